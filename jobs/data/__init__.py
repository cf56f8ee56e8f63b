"""Datasets. One file, one decorated function, one name."""
