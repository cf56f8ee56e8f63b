from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import IterableDataset, TensorDataset, random_split

from jobs.data.base import Data, DataError
from jobs.data.given import Given
from jobs.data.mnist import mnist
from jobs.data.once import prepare_once
from jobs.data.synthetic import synthetic
from jobs.loader import Fetch
from jobs.world import Meeting, PeerError, World

PAIRS = TensorDataset(torch.arange(6.0)[:, None], torch.arange(6))


@pytest.mark.parametrize(
    ("made", "held_out"),
    [(PAIRS, None), ((PAIRS, PAIRS), 6), ([PAIRS, None], None), (Data(PAIRS, PAIRS), 6), (synthetic(samples=6), 1000)],
)
def test_a_function_may_return_a_dataset_a_pair_or_a_source(made: Any, held_out: int | None) -> None:
    source = Given("mine:data", lambda: made)
    source.prepare()
    data = source.load()
    assert len(data.train) == 6
    assert (None if data.evaluation is None else len(data.evaluation)) == held_out
    inputs, targets = Fetch(data.train, 0)[0, torch.tensor([1, 4])]
    assert (len(inputs), len(targets)) == (2, 2)


def test_a_function_is_called_once_and_not_before_it_is_time() -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return synthetic(kind="regression")

    source = Given("mine:data", make)
    assert not calls
    source.prepare()
    source.load()
    assert calls == [1]
    assert source.task == "regression"


class Drawn:
    def prepare(self) -> None:
        torch.rand(3)

    def load(self) -> TensorDataset:
        return TensorDataset(torch.rand(6), torch.arange(6))


def drawn_by_numpy_and_python() -> TensorDataset:
    drawn = torch.tensor([random.random(), np.random.rand()])
    return TensorDataset(drawn, torch.arange(2))


@pytest.mark.parametrize("make", [lambda: random_split(PAIRS, [4, 2]), Drawn, drawn_by_numpy_and_python])
def test_what_a_function_draws_is_the_same_on_all_ranks(make: Callable[[], Any]) -> None:
    def numbers(*, prepares: bool) -> list[Any]:
        source = Given("mine:data", make)
        if prepares:
            source.prepare()
        data = source.load()
        return [data.train[k][0].tolist() for k in range(len(data.train))]

    torch.manual_seed(1)
    first = numbers(prepares=True)
    torch.manual_seed(2)
    assert numbers(prepares=False) == first


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Endless(), "IterableDataset"),
        (7, "is a int: it returns a dataset"),
        ([], "is empty"),
        ([1, 2, 3], "a sample is a int, and not a pair"),
        ([(object(), 1)] * 3, "a sample is object and int, and tensors or numbers are needed"),
        ([({"a": 1}, 1)] * 3, "each has to be one tensor or number"),
        ((PAIRS, []), "the held-out data of mine:data is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Given("mine:data", lambda: made).load()


class Recorded:
    """A source with a folder per node, or one for all; says who has prepared."""

    def __init__(self, home: Path, rank: int, log: list[int], fails: bool = False) -> None:
        self.home, self._rank, self._log, self._fails = home, rank, log, fails

    def is_ready(self) -> bool:
        return (self.home / "done").exists()

    def prepare(self) -> None:
        if self._fails:
            raise DataError("no space left")
        self._log.append(self._rank)
        (self.home / "done").touch()

    def load(self) -> Data:
        raise NotImplementedError


def meet(make: Any, nodes: int = 3, per_node: int = 2) -> list[BaseException | None]:
    """Prepare what `make(rank, node)` returns, on all ranks at once."""
    store = HashStore()

    def one(rank: int) -> BaseException | None:
        node, local_rank = divmod(rank, per_node)
        world = World(rank=rank, size=nodes * per_node, local_rank=local_rank, local_size=per_node, node=node)
        try:
            prepare_once(make(rank, node), Meeting(store, world))
        except RuntimeError as error:
            return error
        return None

    with ThreadPoolExecutor(nodes * per_node) as pool:
        return list(pool.map(one, range(nodes * per_node)))


@pytest.mark.parametrize(
    ("folders", "preparing"),
    [
        (("all", "all", "all"), [0]),
        (("own-0", "own-1", "own-2"), [0, 2, 4]),
        (("own-0", "shared", "shared"), [0, 2]),
    ],
)
def test_data_is_prepared_once_per_file_system(tmp_path: Path, folders: tuple[str, ...], preparing: list[int]) -> None:
    """F006: whichever nodes share a folder."""
    log: list[int] = []
    assert meet(lambda rank, node: Recorded(tmp_path / folders[node], rank, log)) == [None] * 6
    assert sorted(log) == preparing
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["done"] * len(preparing)
    assert meet(lambda rank, node: Recorded(tmp_path / folders[node], rank, log)) == [None] * 6
    assert sorted(log) == preparing  # it is there already


def test_what_one_cannot_prepare_fails_on_all_and_leaves_no_token(tmp_path: Path) -> None:
    outcomes = meet(lambda rank, node: Recorded(tmp_path, rank, [], fails=True))
    assert isinstance(outcomes[0], DataError)
    assert all(isinstance(outcome, PeerError) and "no space left" in str(outcome) for outcome in outcomes[1:])
    assert not list(tmp_path.iterdir())


def test_a_source_without_a_folder_is_prepared_by_the_first_node_before_the_others() -> None:
    log: list[tuple[str, int]] = []

    class Other:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def prepare(self) -> None:
            log.append(("begin", self._rank))
            log.append(("end", self._rank))

        def load(self) -> Data:
            raise NotImplementedError

    assert meet(lambda rank, node: Other(rank)) == [None] * 6
    assert log[:2] == [("begin", 0), ("end", 0)]
    assert sorted(rank for what, rank in log if what == "begin") == [0, 2, 4]


def test_what_ships_with_the_package_asks_nobody(tmp_path: Path) -> None:
    assert mnist().home is None
    assert synthetic().home is None
    assert mnist(full=True, root=str(tmp_path)).home == tmp_path
