"""A distributed training launcher for PyTorch: one YAML recipe becomes a run on one machine or many."""

__version__ = "0.1.0"
