"""A distributed training launcher for PyTorch: one YAML recipe becomes a run on one machine, on SLURM or in the cloud."""

__version__ = "0.1.0"
