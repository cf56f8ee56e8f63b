"""Batch norms, and micro-batches that are too small for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from jobs.parts import Parts
from jobs.registry import OptionError
from jobs.sampler import Sampler

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ONE_VALUE = "Expected more than 1 value per channel when training"
"""What PyTorch says of one value per channel."""


def norms_one_sample(parts: Parts) -> bool:
    """Whether a batch norm gets a micro-batch of one sample, on some rank, somewhere in the training.

    The same on all ranks. Stages of a pipeline are not asked: each has other layers, and micro-batches of one size.
    """
    smallest = parts.sampler.smallest_micro_batch(parts.calendar.total_steps)
    has_norm = any(isinstance(each, _NORMS) for each in parts.net.modules())
    return has_norm and smallest == 1 and parts.grid.degrees.pp == 1


@contextmanager
def one_value_is_a_matter_of_the_batch(sampler: Sampler) -> Iterator[None]:
    """Around a forward: an OptionError with the numbers, in place of PyTorch's ValueError without a key."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # a pipeline makes the latter of the former
        if _ONE_VALUE in f"{error}{error.__cause__}":
            raise OptionError(_one_sample(sampler)) from None
        raise


def _one_sample(sampler: Sampler) -> str:
    last = sampler.num_samples % sampler.global_batch_size
    where = f" in the last batch of an epoch, which has {last}" if sampler.micro_batch_size > 1 else ""
    return (
        f"data.global_batch_size: {sampler.global_batch_size}, data-parallel ranks {sampler.world_size}, "
        f"train.accumulate {sampler.accumulate}: a rank gets a micro-batch of one sample{where}, and a batch norm of "
        "this model has one value per channel then, of which there is no variance; use another batch size, or fewer "
        "micro-batches"
    )
