"""The one process per node that starts, watches, restarts and stops the workers. Standard library and torch only."""
