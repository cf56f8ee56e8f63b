"""Models: one file each, one decorator."""
