"""Datasets: one file each, one decorator."""
