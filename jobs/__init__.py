"""The training program that runs on the workers."""
