"""F074: GPUs that cannot reach each other's memory hang in the first all-reduce, and nothing says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from planning_values import facts
from test_planning_doctor import CUDA_TORCH, machine, with_gpu

from launcher.planning import probes
from launcher.planning.all_reduce import LIMIT_S, Runner, Tried, all_reduce_here, judge_all_reduce, runner
from launcher.planning.doctor import Diagnosis, Level
from launcher.planning.probes import Torch

WORKS = Tried(ok=True, reduce_s=0.001, size_bytes=64 << 20)
HANGS = Tried(ok=False, hung=True, said="all ranks have met, and the all-reduce has not ended after 60 s")
FAILS = Tried(ok=False, said="rank 1: RuntimeError: NCCL error")


@dataclass
class Fake:
    """A runner that answers as it was told, and notes with what it was called."""

    answers: list[Tried]
    calls: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, more: Mapping[str, str]) -> Tried:
        self.calls.append(dict(more))
        return self.answers[len(self.calls) - 1]


def judged(*answers: Tried, environment: Mapping[str, str] | None = None, **on: Any) -> tuple[Diagnosis, Fake]:
    fake = Fake(list(answers))
    (found,) = judge_all_reduce(fake, **{"ranks": 4, "on_gpus": True, **on}, environment=environment or {})
    assert len(fake.calls) == len(answers)
    return found, fake


def test_f074_what_works_is_tried_once_and_with_nothing_switched_off() -> None:
    found, fake = judged(WORKS)
    assert fake.calls == [{}]
    assert (found.level, found.what) == (Level.OK, "all-reduce")
    assert found.message == "4 GPUs over NCCL: 64 MiB in 1 ms, bus bandwidth 101 GB/s"


@pytest.mark.parametrize("first", [HANGS, FAILS])
def test_f074_what_fails_is_tried_again_without_peer_to_peer_and_that_is_advised(first: Tried) -> None:
    found, fake = judged(first, WORKS)
    assert fake.calls == [{}, {"NCCL_P2P_DISABLE": "1"}]
    assert found.level is Level.PROBLEM
    assert found.message.startswith(f"4 GPUs over NCCL: {first.said}; with NCCL_P2P_DISABLE=1 it works (64 MiB in ")
    assert "ACS" in found.fix
    assert "network: {nccl: {P2P_DISABLE: true}}" in found.fix


def test_f074_where_that_does_not_help_it_is_not_advised() -> None:
    found, _ = judged(HANGS, FAILS)
    assert found.level is Level.PROBLEM
    assert found.message.endswith("with NCCL_P2P_DISABLE=1 it fails, too (rank 1: RuntimeError: NCCL error)")
    assert "NCCL_DEBUG=INFO" in found.fix
    assert "P2P_DISABLE: true" not in found.fix


def test_f074_where_it_is_off_already_nothing_is_tried_twice() -> None:
    off = {"NCCL_P2P_DISABLE": "1"}
    found, _ = judged(HANGS, environment=off)
    assert found.level is Level.PROBLEM
    assert "though NCCL_P2P_DISABLE=1 is in the environment" in found.message
    found, _ = judged(WORKS, environment=off)
    assert (found.level, found.fix) == (Level.NOTE, "unset NCCL_P2P_DISABLE to see whether it is needed")
    assert judged(HANGS, WORKS, environment={"NCCL_P2P_DISABLE": "0"})[0].level is Level.PROBLEM


def test_f074_processes_on_the_cpu_have_no_peer_to_peer() -> None:
    found, fake = judged(FAILS, on_gpus=False, ranks=2)
    assert fake.calls == [{}]
    assert found.level is Level.PROBLEM
    assert found.message == "2 processes on the CPU over gloo: rank 1: RuntimeError: NCCL error"


@pytest.mark.parametrize(
    ("torch", "asked", "ranks", "on_gpus"),
    [
        ({"devices": 4}, None, 4, True),
        ({"devices": 4}, True, 4, True),
        ({"devices": 4}, False, 0, False),
        ({"devices": 1}, None, 0, False),
        ({"devices": 1}, True, 2, False),
        ({"devices": 4, "fault": "driver too old"}, None, 0, False),
        ({"devices": 4, "distributed": False}, None, 0, False),
    ],
)
def test_f074_it_is_tried_where_there_are_several_gpus_or_on_demand(
    torch: dict[str, Any], asked: bool | None, ranks: int, on_gpus: bool
) -> None:
    made: list[dict[str, Any]] = []

    def make(python: str, **how: Any) -> Runner:
        made.append({"python": python, **how})
        return Fake([WORKS])

    torch = {"version": CUDA_TORCH.version, "cuda": "12.6", "architectures": ("sm_90",), **torch}
    found = list(all_reduce_here(with_gpu(torch=Torch(**torch)), asked=asked, environment={}, make=make))
    assert len(found) == len(made) == bool(ranks)
    if ranks:
        assert made == [{"python": facts().python, "ranks": ranks, "on_gpus": on_gpus, "loopback": "lo"}]


def test_f074_what_was_asked_for_and_cannot_be_done_is_a_problem() -> None:
    for torch in (None, Torch(fault="no module"), Torch(version="2.13.0", distributed=False)):
        (found,) = all_reduce_here(machine(torch=torch), asked=True, environment={})
        assert found.level is Level.PROBLEM
        assert found.message.startswith("cannot be tried: there is no torch")


def test_f074_its_limit_is_a_minute_and_an_interpreter_that_is_not_there_is_no_traceback() -> None:
    assert LIMIT_S == 60
    assert "No such file" in runner("/nowhere/python", ranks=2, on_gpus=False, loopback="lo")({}).said
    assert probes.ask_torch("/nowhere/python").fault


def test_f074_what_the_test_itself_says_last_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho warning >&2\necho ImportError: libcudart $NCCL_P2P_DISABLE >&2\nexit 1\n")
    python.chmod(0o755)
    run = runner(str(python), ranks=2, on_gpus=True, loopback="lo")
    assert run({"NCCL_P2P_DISABLE": "1"}) == Tried(ok=False, said="ImportError: libcudart 1")
    python.write_text('#!/bin/sh\necho noise\necho \'{"ok": true, "reduce_s": 2.0, "size_bytes": 8}\'\n')
    assert run({}) == Tried(ok=True, reduce_s=2.0, size_bytes=8)
