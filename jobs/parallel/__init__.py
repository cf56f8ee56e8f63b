"""Parallel strategies: one file each, one decorator."""
