"""Sums through the memory of a host: those of torch to the bit, and nobody waits for a rank that is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ranks import Start, free_port
from tiny import tiny

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("host_sum_ranks.py")
LIMIT_S = 60.0


class Group:
    """Ranks that do one thing."""

    def __init__(self, folder: Path, do: str, ranks: int) -> None:
        self._folder, port = folder, free_port()
        argv = [sys.executable, str(SCRIPT)]
        self._ranks = [
            subprocess.Popen([*argv, str(rank), str(ranks), str(port), do, str(folder)], text=True)
            for rank in range(ranks)
        ]

    def found(self, *ranks: int) -> list[Any]:
        """What these have found; the others are not waited for."""
        for rank in ranks:
            assert self._ranks[rank].wait(LIMIT_S) == 0
        return [json.loads((self._folder / str(rank)).read_text()) for rank in ranks]

    def end(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()


@pytest.fixture
def groups() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_group(groups: ExitStack, folder: Path, do: str, ranks: int) -> Group:
    group = Group(folder, do, ranks)
    groups.callback(group.end)
    return group


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_sums_are_those_of_torch_to_the_bit(groups: ExitStack, tmp_path: Path, ranks: int) -> None:
    assert start_group(groups, tmp_path, "sums", ranks).found(*range(ranks)) == [[]] * ranks


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("killed", "ConnectionResetError: Connection closed by peer: rank 2"),
        ("shut", "ConnectionResetError: Connection closed by peer: rank "),
        ("late", "RuntimeError: Timed out waiting 500ms for rank 2 of this host"),
    ],
)
def test_all_others_see_a_rank_that_does_not_come(groups: ExitStack, tmp_path: Path, how: str, message: str) -> None:
    """Whose connections are shut by a thread of its own, as its agent orders it, does not wait either."""
    for is_lost, said in start_group(groups, tmp_path, how, 3).found(0, 1):
        assert is_lost
        assert said.startswith(message)


def test_without_memory_or_on_several_hosts_nobody_has_it(groups: ExitStack, tmp_path: Path) -> None:
    assert start_group(groups, tmp_path, "refusals", 3).found(0, 1, 2) == [[True, True]] * 3


def test_ranks_of_one_host_and_of_two_train_alike(start: Start, tmp_path: Path) -> None:
    """To the bit: with three ranks a sum depends on its order."""
    recipe = tiny(train={"until": "6 steps"}, data={"global_batch_size": 12})
    alone = start(tmp_path / "one", recipe, ranks=3)
    assert alone.wait() == [0, 0, 0], alone.log()
    apart = start(tmp_path / "three", recipe, ranks=3, local_size=1)
    assert apart.wait() == [0, 0, 0], apart.log()
    assert alone.weights == apart.weights
