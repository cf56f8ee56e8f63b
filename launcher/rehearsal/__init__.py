"""`launch try`: a run is started, disturbed and compared on this machine, before it waits in a queue.

`stage.py` starts and disturbs real runs, by the `launch` command itself; `checks.py` judges what they left behind, and
is pure; `plays.py` is what happens in which order, for the built-in program and for scripts.
"""
