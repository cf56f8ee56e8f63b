"""What belongs to a clean training process: when it collects garbage, and whether its algorithms are deterministic."""

from __future__ import annotations

import gc
import os

import torch

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With which products of matrices on a GPU are deterministic. The plan sets it; here it is for a job by hand."""
YOUNG = 1
"""The generations that a quick collection looks at: what was made since the last one."""
EVERY = 50
"""Steps between two of these."""


def set_deterministic(wanted: bool) -> None:
    """`train.deterministic`: an operation that has no deterministic algorithm is an error.

    Algorithms of cuDNN are never chosen by trying them out (`benchmark`): the choice may differ after a resume.
    """
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        os.environ.setdefault(*WORKSPACE)  # read when the first product is computed
    torch.use_deterministic_algorithms(wanted)


class Garbage:
    """Collects where a training chooses, on all ranks between the same two steps; elsewhere nothing is.

    Python would collect in the middle of a step, on one rank now and on another then, and all would wait each time.
    """

    def __enter__(self) -> Garbage:
        gc.collect()
        gc.freeze()  # what is here now stays: no collection has to look at it again
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.enable()

    def collect(self, step: int, *, pauses: bool) -> None:
        """Between two steps. pauses: the training has paused anyway, so all is looked at, and not what is new alone."""
        if pauses:
            gc.collect()
        elif step % EVERY == 0:
            gc.collect(YOUNG)
