"""With which nodes an attempt may start."""

from __future__ import annotations

from launcher.agent.members import FIRST_S, RETURN_S, Members


def some(ready: list[int], *, joined: tuple[int, ...] = (), nodes: int = 4, **fields: int) -> Members:
    members = Members.of(nodes, {}, **fields)
    for index in ready:
        members.nodes[index].ready = True
    for index in (*ready, *joined):
        members.nodes[index].joined = True
    return members


def may_start(members: Members, *, waited_s: float = 0.0, first: bool = False) -> tuple[int, ...] | None:
    return members.to_start(1000.0, waited_s=waited_s, first=first)


def test_a_run_of_a_fixed_size_needs_all() -> None:
    assert may_start(some([0, 1, 2]), waited_s=1e6) is None
    assert may_start(some([0, 1, 2, 3])) == (0, 1, 2, 3)


def test_an_elastic_one_goes_on_with_those_that_are_there() -> None:
    assert may_start(some([0, 2], minimum=2)) == (0, 2)
    assert may_start(some([0, 2], minimum=3)) is None


def test_the_node_of_the_head_agent_always_takes_part() -> None:
    assert may_start(some([1, 2, 3], minimum=1)) is None


def test_who_is_there_and_not_ready_yet_is_waited_for() -> None:
    assert may_start(some([0, 2], joined=(1,), minimum=1)) is None


def test_a_lost_node_has_a_moment_to_come_back() -> None:
    members = some([0, 1], minimum=1)
    members.nodes[2].heard_at_s = 1000.0 - RETURN_S + 0.1
    assert may_start(members) is None
    members.nodes[2].heard_at_s = 1000.0 - RETURN_S
    assert may_start(members) == (0, 1)


def test_at_the_beginning_all_have_time_to_come() -> None:
    assert may_start(some([0, 1], minimum=1), waited_s=FIRST_S - 1, first=True) is None
    assert may_start(some([0, 1], minimum=1), waited_s=FIRST_S, first=True) == (0, 1)
    assert may_start(some([0, 1, 2, 3], minimum=1), first=True) == (0, 1, 2, 3)


def test_nodes_that_the_allocation_does_not_have_are_not_waited_for() -> None:
    assert may_start(some([0, 1], minimum=1, present=2), first=True) == (0, 1)
    assert some([0], minimum=1, present=2).missing() == {1: "?"}


def test_ranks_are_numbered_over_the_nodes_that_take_part() -> None:
    members = some([0, 2, 3], minimum=1, workers_per_node=2)
    members.start((0, 2, 3))
    assert list(members.ranks) == [0, 1, 2, 3, 4, 5]
    assert [members.node_of(rank) for rank in members.ranks] == [0, 0, 2, 2, 3, 3]
    assert members.named([3, 4]) == "rank 3 on node 2 (?), rank 4 on node 3 (?)"
    assert members.named(list(members.ranks)).endswith("rank 3 on node 2 (?) and 2 more")


def test_who_comes_while_others_run_is_a_newcomer() -> None:
    members = some([0, 2], minimum=1)
    members.start((0, 2))
    assert members.newcomers == []
    members.nodes[1].ready = True
    assert members.newcomers == [1]


def test_a_pause_of_our_own_is_nobodys_silence() -> None:
    members = some([0, 1])
    members.nodes[0].heard_at_s = 90.0
    members.frozen(30.0)
    assert members.nodes[0].heard_at_s == 120.0


def test_enough_are_there_when_the_next_attempt_could_begin() -> None:
    assert some([0, 1], joined=(2, 3)).enough
    assert not some([0, 1], joined=(2,)).enough
    assert some([0], joined=(2,), minimum=2).enough
    assert not some([0], minimum=2).enough
    assert not some([1, 2], minimum=1).enough, "without the head agent's node"
