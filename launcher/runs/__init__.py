"""The record of a run: its directory, its events, its state."""
