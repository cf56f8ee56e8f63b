"""A real SLURM cluster on one machine: nodes are network namespaces, GPUs are only names. Standard library only."""
