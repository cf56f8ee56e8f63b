"""Strategies: how the ranks share the work. One file, one decorated function, one name."""
