"""Tasks: what is learned. One file, one decorated function, one name."""
