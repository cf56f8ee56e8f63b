"""Who sees the same folder, of what each node has seen; without a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.store_disks import Disks, StoreError, _join, find_disks, one_disk, refuse_several, sentence
from jobs.world import World


def joined(nodes: list[int], seen: dict[int, list[int]]) -> Disks:
    """nodes: of each rank; seen: whose tokens the first rank of a node has seen."""
    lead_of = [nodes.index(node) for node in nodes]
    return _join(lead_of, nodes, [seen.get(rank, []) for rank in range(len(nodes))])


def test_two_nodes_that_see_only_their_own_tokens_have_two_disks() -> None:
    disks = joined([0, 0, 1, 1], {0: [0], 2: [2]})
    assert disks.of_rank == (0, 0, 1, 1)
    assert disks.names == ("node 0", "node 1")
    assert [disks.lead(disk) for disk in range(disks.count)] == [0, 2]
    assert [disks.share(rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [disks.is_lead(rank) for rank in range(4)] == [True, False, True, False]


def test_nodes_that_share_a_folder_without_the_first_are_one_disk() -> None:
    disks = joined([0, 1, 2], {0: [0], 1: [1, 2], 2: [1, 2]})
    assert disks.of_rank == (0, 1, 1)
    assert disks.names == ("node 0", "nodes 1, 2")
    assert disks.share(2) == (1, 2)


def test_one_that_sees_the_other_is_enough_and_so_is_a_third_between_them() -> None:
    """A listing may be old on one side; to copy a checkpoint onto itself would destroy it."""
    assert joined([0, 1], {0: [0], 1: [0, 1]}).count == 1
    assert joined([0, 1, 2], {0: [0], 1: [1, 2], 2: [0, 2]}).count == 1


class OneByOne:
    """Meets for two ranks, each a node, that look at folders of their own."""

    def __init__(self, rank: int, others: list[dict[str, Any]]) -> None:
        self.world = World(rank=rank, size=2, local_rank=0, local_size=1, node=rank)
        self._others, self.asked = others, []

    def gather(self, what: str, function: Callable[[], Any]) -> list[Any]:
        own, other = function(), self._others.pop(0)
        return [own, other["value"]] if self.world.rank == 0 else [other["value"], own]


def test_no_token_stays(tmp_path: Path) -> None:
    meeting = OneByOne(0, [{"value": 1}, {"value": ".probe-1-shared-1-x"}, {"value": [1]}])
    disks = find_disks(meeting, tmp_path, attempt=1, must_be_one=False)  # type: ignore[arg-type]
    assert disks.count == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_must_be_one_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"checkpoint\.store: shared, and .* on node 1 than on node 0") as error:
        refuse_several(joined([0, 1], {0: [0], 1: [1]}), tmp_path)
    assert "checkpoint.store: replicate" in str(error.value)
    refuse_several(one_disk(2), tmp_path)


def test_what_is_said() -> None:
    two = joined([0, 1], {0: [0], 1: [1]})
    assert sentence(two, "replicate") == "checkpoints are kept on the disks of node 0 and node 1"
    assert "not copied" in sentence(one_disk(4), "replicate")
    assert "put together on the disk of node 0" in sentence(two, "s3://bucket")
    assert sentence(one_disk(4), "shared") == sentence(one_disk(4), "s3://bucket") == ""
