"""explain, stacks, sync and doctor: what they print, refuse and return."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_values as values
from fake_executor import STARTS, FakeExecutor

from launcher.planning.all_reduce import Tried
from launcher.planning.facts import Interface
from launcher.planning.host_facts import HostFacts
from launcher.planning.machine import Driver, Machine, Space
from launcher.planning.probes import Torch
from launcher.runs.find import all_runs
from launcher.runs.rundir import RunDir
from launcher.runs.stacks import Frame, RankStack, Thread

Launch = Callable[..., Any]
Place = type[FakeExecutor]
GIB = 1 << 30
INTERFACES = (
    Interface(name="lo", addresses=("127.0.0.1",), loopback=True),
    Interface(name="eth0", addresses=("10.0.0.1",), loopback=False),
)


@pytest.fixture
def alive(launch: Launch, place: Place, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A detached run of two nodes that goes on."""
    monkeypatch.setattr(place, "script", STARTS)
    monkeypatch.setattr(place, "stays", True)
    assert launch("train.py", "--nodes", "2", "--detach", "resume=self").code == 0
    for _ in STARTS:
        launch("status", "last")
    return all_runs()[0].run


@pytest.fixture
def done(launch: Launch, place: Place) -> RunDir:
    """A script that has succeeded."""
    assert launch("train.py").code == 0
    return all_runs()[0].run


class TestExplain:
    def test_everything_of_a_run_that_goes_on(self, launch: Launch, alive: RunDir) -> None:
        text = launch("explain", "last").out
        assert text.startswith(alive.run_id)
        assert "attempt 1  [::1]:5 " in text
        assert "GLOO_SOCKET_IFNAME" in text
        sections = launch("explain", "last", "--json").json["sections"]
        assert {row["name"] for row in sections["Addresses and ports"]} == {"attempt 1"}

    def test_one_rank(self, launch: Launch, alive: RunDir) -> None:
        rows = launch("explain", "last", "--rank", "1", "--json").json["sections"]["Environment of rank 1"]
        values = {row["name"]: row["value"] for row in rows}
        assert (values["RANK"], values["GROUP_RANK"], values["MASTER_PORT"]) == ("1", "1", "5")

    def test_a_rank_that_is_not_there(self, launch: Launch, alive: RunDir) -> None:
        said = launch("explain", "last", "--rank", "2")
        assert said.code == 2
        assert "there is no rank 2; the ranks are 0 to 1" in said.err


class TestStacks:
    @pytest.fixture(autouse=True)
    def _taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def take(targets: Any, *, run_id: str, hostname: str) -> list[RankStack]:
            run_dir = targets[0].log.parents[3]
            frames = (Frame(function="step", file=f"{run_dir}/code/t.py", line=4),)
            thread = Thread(name="MainThread", main=True, running=True, frames=frames)
            return [
                RankStack(rank=each.rank, node=each.node, pid=each.pid, threads=(thread,), source="py-spy")
                if each.host == "here" and each.rank == 0
                else RankStack(rank=each.rank, node=each.node, pid=each.pid, trouble="it has ended", hint="wait")
                for each in targets
            ]

        monkeypatch.setattr("launcher.runs.spy.take_stacks", take)

    def test_what_could_not_be_seen_is_said_and_counts(self, launch: Launch, alive: RunDir) -> None:
        said = launch("stacks", "last")
        assert said.code == 1
        assert "stacks of 1 of 2 ranks, from py-spy" in said.out
        assert "rank 0  t.py:4 in step   (running)" in said.out
        assert "rank 1  it has ended" in said.out
        assert "hint: wait" in said.out

    def test_one_rank_in_full_and_as_json(self, launch: Launch, alive: RunDir) -> None:
        said = launch("stacks", "last", "--rank", "0", "-v")
        assert said.code == 0
        assert "/code/t.py:4 in step" in said.out
        (rank,) = launch("stacks", "last", "--rank", "0", "--json").json["ranks"]
        assert (rank["rank"], rank["pid"], rank["source"]) == (0, 20, "py-spy")

    def test_a_rank_that_does_not_run(self, launch: Launch, alive: RunDir) -> None:
        said = launch("stacks", "last", "--rank", "7")
        assert said.code == 3
        assert "rank 7 does not run" in said.err

    def test_a_run_that_has_ended(self, launch: Launch, done: RunDir) -> None:
        said = launch("stacks", "last")
        assert said.code == 3
        assert "no worker runs: SUCCEEDED" in said.err


class TestSync:
    """F062."""

    def test_a_run_that_goes_on_is_left_alone(self, launch: Launch, alive: RunDir) -> None:
        said = launch("sync", "last")
        assert said.code == 3
        assert "it goes on" in said.err

    def test_nothing_offline(self, launch: Launch, done: RunDir) -> None:
        said = launch("sync", "last")
        assert said.code == 3
        assert "no offline parts" in said.err

    def test_the_plan_and_what_is_missing_for_it(
        self, launch: Launch, done: RunDir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for time in ("20261130_000002", "20261130_000001"):
            part = done.path / "wandb" / f"offline-run-{time}-{done.run_id}"
            part.mkdir(parents=True)
            (part / "run-x.wandb").touch()
        planned = launch("sync", "last", "--dry-run")
        assert planned.code == 0
        assert [line.split()[4] for line in planned.out.splitlines()[1:]] == [
            f"offline-run-20261130_00000{k}-{done.run_id}" for k in (1, 2)
        ]
        without_key = launch("sync", "last")
        assert without_key.code == 3
        assert "there is no key for https://api.wandb.ai" in without_key.err
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
            monkeypatch.setenv("WANDB_API_KEY", "k3y" * 14)
            without_server = launch("sync", "last")
        assert without_server.code == 3
        assert "does not answer" in without_server.err
        assert "k3y" not in without_server.err


class TestDoctor:
    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        def place_at(**changes: Any) -> None:
            space = Space(
                path="/x", kind="ext4", total_bytes=GIB * 99, free_bytes=GIB * 99, free_inodes=1.0, writable=True
            )
            known: dict[str, Any] = {
                "facts": values.facts(),
                "torch": Torch(version="2.13.0"),
                "driver": Driver(),
                "name_addresses": ("10.0.0.1",),
                "ports": None,
                "sockets": 0,
                "port_fault": "",
                "limits": dict.fromkeys(("nofile", "memlock", "nproc"), (-1, -1)) | {"core": (0, 0)},
                "shm": space,
                "runs": space,
                "state": space,
                "tmp": space,
                "machine_cpus": 2,
                "memory_bytes": GIB * 64,
                "memory_limit_bytes": None,
                "available_bytes": GIB * 60,
                "clock_synchronised": None,
                "pyspy_fault": "",
                "wandb_version": None,
                "wandb_key": "",
                "tools": {},
            }
            made = Machine(**{**known, **changes})
            monkeypatch.setattr("launcher.planning.machine.probe_machine", lambda *_, **__: made)
            asked = HostFacts(hostname="lovelace")
            monkeypatch.setattr("launcher.executors.host_doctor.ask_host", lambda *_, **__: asked)

        return place_at

    def test_notes_are_no_failure(self, launch: Launch, machine: Callable[..., None]) -> None:
        machine(facts=values.facts(interfaces=()))
        said = launch("doctor")
        assert said.code == 1, "no loopback interface"
        assert "PROBLEM  network" in said.out
        machine(facts=values.facts(interfaces=INTERFACES))
        said = launch("doctor")
        assert said.code == 0
        assert "not installed: curves are in metrics.jsonl alone" in said.out
        assert "fix: pip install wandb" in said.out
        assert said.out.endswith("\n0 problems, 1 note\n")

    def test_as_json(self, launch: Launch, machine: Callable[..., None]) -> None:
        machine(shm=None, facts=values.facts(interfaces=INTERFACES))
        said = launch("doctor", "--json")
        assert said.code == 1
        assert said.json["problems"] == 1
        (problem,) = [each for each in said.json["findings"] if each["level"] == "PROBLEM"]
        assert problem["what"] == "/dev/shm"
        assert problem["fix"]

    def test_gpus_add_up_numbers_without_being_asked(
        self, launch: Launch, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F074"""
        tried: list[dict[str, Any]] = []

        def runner(_python: str, **how: Any) -> Callable[..., Tried]:
            tried.append(how)
            return lambda more: Tried(ok=bool(more), said="it hangs", reduce_s=1.0, size_bytes=8)

        monkeypatch.setattr("launcher.planning.all_reduce.runner", runner)
        monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
        machine(facts=values.facts(interfaces=INTERFACES))
        assert "all-reduce" not in launch("doctor").out
        assert launch("doctor", "--all-reduce").code == 1
        assert tried == [{"ranks": 2, "on_gpus": False, "loopback": "lo"}]
        machine(facts=values.facts(interfaces=INTERFACES), torch=Torch(version="2.13.0", cuda="12.6", devices=4))
        said = launch("doctor")
        assert (said.code, tried[1:]) == (1, [{"ranks": 4, "on_gpus": True, "loopback": "lo"}])
        assert "PROBLEM  all-reduce  4 GPUs over NCCL: it hangs; with NCCL_P2P_DISABLE=1 it works" in said.out
        assert "all-reduce" not in launch("doctor", "--no-all-reduce").out

    def test_this_machine_whatever_it_has(
        self, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Nothing on PATH: no tool is needed, and none that is absent is a traceback."""
        monkeypatch.setenv("PATH", str(tmp_path))
        said = launch("doctor", "--runs-dir", str(tmp_path / "runs"))
        assert said.code in (0, 1)
        assert "tools" in said.out
        assert "none; not here: git, nvidia-smi" in said.out
        assert said.err == ""


def test_check_remarks_on_files_of_the_data_that_are_not_here(launch: Launch) -> None:
    """Relative to the workdir; the launch itself would be refused."""
    Path("sub").mkdir()
    data = "{name: text, path: a.txt, global_batch_size: 8}"
    recipe = f"name: book\nworkdir: .\nmodel: {{name: gpt}}\ntrain: {{until: 3 steps}}\ndata: {data}\n"
    Path("sub/a.yaml").write_text(recipe)
    missing = f"    - data.path: there is no {Path.cwd()}/sub/a.txt\n"
    said = launch("check", "sub/a.yaml")
    assert (said.code, said.out) == (0, f"ok  sub/a.yaml\n{missing}")
    Path("sub/a.txt").touch()
    assert launch("check", "sub/a.yaml").out == "ok  sub/a.yaml\n"
