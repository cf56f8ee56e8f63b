"""For whom the others wait, by the places of all ranks."""

from __future__ import annotations

import pytest

from launcher.agent.culprits import Place, find_culprits
from launcher.runs.stacks import Frame, waits_for_others

TORCH = "/v/lib/python3.11/site-packages/torch"


def frames(*calls: tuple[str, str]) -> tuple[Frame, ...]:
    """The innermost first."""
    return tuple(Frame(function=function, file=file, line=10 + index) for index, (file, function) in enumerate(calls))


STEP = ("/run/code/train.py", "step")
C10D = f"{TORCH}/distributed/distributed_c10d.py"
IN_ALL_REDUCE = frames((C10D, "all_reduce"), (f"{TORCH}/distributed/c10d_logger.py", "wrapper"), STEP)
IN_BARRIER = frames((C10D, "barrier"), (f"{TORCH}/distributed/c10d_logger.py", "wrapper"), STEP)
IN_BACKWARD = frames(
    (f"{TORCH}/autograd/graph.py", "_engine_run_backward"), (f"{TORCH}/autograd/__init__.py", "backward"), STEP
)
IN_LOADER = frames((f"{TORCH}/utils/data/dataloader.py", "__next__"), STEP)
IN_BUFFERS = frames((f"{TORCH}/nn/parallel/distributed.py", "_sync_module_states"), STEP)
IN_FORWARD_OF_DDP = frames(
    (f"{TORCH}/nn/modules/linear.py", "forward"),
    (f"{TORCH}/nn/modules/module.py", "_call_impl"),
    (f"{TORCH}/nn/parallel/distributed.py", "_run_ddp_forward"),
    STEP,
)
IN_AGREEMENT = frames(("/home/u/venv/lib/python3.11/site-packages/jobs/agreement.py", "receive"), STEP)
UNDER_RECORD = frames(("/v/lib/python3.11/re/__init__.py", "match"), (f"{TORCH}/distributed/elastic/errors.py", "wrap"))
IN_USERS_CODE = frames(STEP)


@pytest.mark.parametrize("place", [IN_ALL_REDUCE, IN_BARRIER, IN_BACKWARD, IN_BUFFERS, IN_AGREEMENT])
def test_what_waits_for_others(place: tuple[Frame, ...]) -> None:
    assert waits_for_others(place)


@pytest.mark.parametrize("place", [IN_LOADER, IN_FORWARD_OF_DDP, UNDER_RECORD, IN_USERS_CODE, ()])
def test_what_does_not(place: tuple[Frame, ...]) -> None:
    assert not waits_for_others(place)


def test_a_wait_that_leaves_no_frame_is_read_in_its_line() -> None:
    assert waits_for_others(IN_USERS_CODE, "work.wait()")
    assert waits_for_others(IN_USERS_CODE, "group.all_gather_into_tensor(out, shard)")
    assert not waits_for_others(IN_USERS_CODE, "time.sleep(3600)")


def test_who_does_not_wait_is_to_blame() -> None:
    found = find_culprits({0: Place(frames=IN_BACKWARD), 1: Place(frames=IN_LOADER), 2: Place(frames=IN_BACKWARD)})
    assert (found.culprits, found.waiting) == ((1,), (0, 2))
    assert found.waiting_at == "backward at /run/code/train.py:12 in step"


def test_who_is_stopped_is_to_blame_wherever_it_was_and_before_all_others() -> None:
    places = {0: Place(frames=IN_LOADER), 1: Place(frames=IN_ALL_REDUCE, state="T"), 2: Place(frames=IN_ALL_REDUCE)}
    assert find_culprits(places).culprits == (1,)
    assert places[1].words == "is stopped (state T), in all_reduce at /run/code/train.py:12 in step"


def test_who_cannot_be_woken_is_said_to_wait_for_its_disk() -> None:
    words = Place(state="D", trouble="it does not answer the signal").words
    assert words == ("is in an uninterruptible wait (state D): its disk or its network file system does not answer")


def test_who_gives_no_answer_is_to_blame() -> None:
    found = find_culprits({0: Place(frames=IN_ALL_REDUCE), 1: Place(trouble="its agent has not answered")})
    assert found.culprits == (1,)


def test_of_ranks_that_all_wait_the_one_apart_is_to_blame() -> None:
    places = {rank: Place(step=5, frames=IN_ALL_REDUCE) for rank in range(4)}
    places[2] = Place(step=5, frames=IN_BARRIER)
    found = find_culprits(places)
    assert (found.culprits, found.waiting, found.mismatched) == ((2,), (0, 1, 3), True)
    assert "different collectives" in found.note


def test_of_two_that_wait_the_one_ahead_has_left_out_a_collective() -> None:
    found = find_culprits({0: Place(step=5, frames=IN_BACKWARD), 1: Place(step=6, frames=IN_ALL_REDUCE)})
    assert (found.culprits, found.waiting) == ((1,), (0,))


def test_of_two_that_wait_apart_at_the_same_step_both_are_named() -> None:
    found = find_culprits({0: Place(step=5, frames=IN_BARRIER), 1: Place(step=5, frames=IN_ALL_REDUCE)})
    assert found.culprits == (0, 1)


def test_where_all_wait_for_the_same_nobody_is_blamed() -> None:
    found = find_culprits({rank: Place(step=5, frames=IN_ALL_REDUCE) for rank in range(3)})
    assert (found.culprits, found.waiting, found.mismatched) == ((), (0, 1, 2), False)
    assert "the network" in found.note
