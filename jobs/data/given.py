"""Data of the user's own: what the function behind `data.target` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from jobs.data.base import Data, DataError, Samples
from jobs.loader import seed_all
from jobs.sampler import derive_seed


class Given:
    """A source around a function that returns a `Source`, a dataset, or a pair of datasets (to train on, held out).

    The function is called when there is something to do, first by the rank that prepares: what it downloads is there
    when the others call it. What it draws at random (a `random_split`) is the same on all ranks, and again after a
    resume or in an evaluation: the generators are seeded before, with a seed that no recipe changes.
    """

    def __init__(self, target: str, make: Callable[[], Any]) -> None:
        self._target, self._make = target, make
        self._made: Any = None

    @property
    def task(self) -> str:
        """What the user's source says that it is made for."""
        return str(getattr(self._made, "task", "classification"))

    def prepare(self) -> None:
        """Call the function, and let the source that it returns prepare."""
        made = self._call()
        if _is_source(made):
            made.prepare()

    def load(self) -> Data:
        """The datasets. Raises DataError where they are none that can be trained on."""
        made = self._call()
        if _is_source(made):
            _seed()  # again: only some ranks have prepared
            data = made.load()
        else:
            data = made
        if not isinstance(data, Data):
            data = Data(*data) if isinstance(data, tuple | list) and len(data) == 2 else Data(data)
        self._check("", data.train)
        if data.evaluation is not None:
            self._check("the held-out data of ", data.evaluation)
        return data

    def _call(self) -> Any:
        if self._made is None:
            _seed()
            self._made = self._make()
        return self._made

    def _check(self, which: str, samples: Samples) -> None:
        """Whether these are samples by index, each an input and a target."""
        place, kind = f"data.target: {which}{self._target}", type(samples).__name__
        if isinstance(samples, IterableDataset):
            raise DataError(f"{place} is an IterableDataset ({kind}): samples have to be found by their index")
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise DataError(
                f"{place} is a {kind}: it returns a dataset with __len__ and __getitem__, a pair of them (to train on, "
                f"held out), or a jobs.data.base.Source"
            )
        if not len(samples):
            raise DataError(f"{place} is empty")
        if not hasattr(samples, "__getitems__"):
            _check_sample(place, samples[0])


def _check_sample(place: str, sample: Any) -> None:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"{place}: a sample is a {type(sample).__name__}, and not a pair of input and target")
    try:
        parts = default_collate([sample])
    except TypeError as error:
        kinds = " and ".join(type(part).__name__ for part in sample)
        raise DataError(f"{place}: a sample is {kinds}, and tensors or numbers are needed ({error})") from None
    if not all(isinstance(part, Tensor) for part in parts):
        kinds = " and ".join(type(part).__name__ for part in sample)
        raise DataError(f"{place}: a sample is {kinds}, and each has to be one tensor or number")


def _seed() -> None:
    seed_all(derive_seed("target"))


def _is_source(made: Any) -> bool:
    return hasattr(made, "prepare") and hasattr(made, "load")
