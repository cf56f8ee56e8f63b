"""Start after start, end after end, half of them by kill -9: nothing is left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Launch, Launched, Recipe, zygote_of

import launcher

pytestmark = pytest.mark.process

CYCLES = int(os.environ.get("LAUNCH_TEST_CYCLES", "50"))
RESTARTS = 50
GONE_S = 20.0
"""A killed run is gone 10 s later; more is a leak."""
ProcessesOf = Callable[[str], list[int]]

LITTERS = """
import multiprocessing, os, pathlib, subprocess, sys, tempfile, toy
from multiprocessing import shared_memory

context = multiprocessing.get_context("fork")
ends, beginning = context.Pipe()
loader = context.Process(target=ends.recv, daemon=True)      # as a DataLoader has them
loader.start()
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
folder = tempfile.mkdtemp(prefix="litter-")
manager = context.Manager()                                  # a socket in pymp-*, a process
segment = shared_memory.SharedMemory(create=True, size=4096) # psm_* in /dev/shm, a resource tracker
own = pathlib.Path(f"/dev/shm/torch_{loader.pid}_1_2")       # as torch names those of a loader process
own.write_bytes(bytes(16))
(toy.RUN / f"shm.{toy.RANK}").write_text(f"{segment.name.strip('/')} {own.name}")
(toy.RUN / f"tmp.{toy.RANK}").write_text(folder)
toy.mark("up")
toy.wait_for("go")
segment.close()
segment.unlink()
own.unlink()
loader.kill()
sys.exit(int((toy.RUN / "go").read_text() or 0))
"""


def victim(run: Launched, name: str) -> int:
    """The pid of one of the processes of a run."""
    if name == "launch":
        return run.process.pid
    if name == "supervisor":
        return int(run.happened("supervisor_started")[-1]["pid"])
    if name == "worker":
        return int(run.happened("worker_started")[-1]["pid"])
    agent = int(run.happened("agent_started")[-1]["pid"])
    if name == "agent":
        return agent
    return zygote_of(agent)


def end(run: Launched, how: str) -> None:
    """End a run in one of the ways in which runs end."""
    if how in ("0", "3"):
        (run.run.path / "go.tmp").write_text(how)
        (run.run.path / "go.tmp").rename(run.run.path / "go")
    elif how in ("TERM", "INT", "HUP"):
        run.signal(getattr(signal, f"SIG{how}"))
    else:
        os.kill(victim(run, how), signal.SIGKILL)


def wait_until_gone(run: Launched, processes_of: ProcessesOf, how: str) -> None:
    deadline_s = time.monotonic() + GONE_S
    while left := processes_of(run.run_id):
        assert time.monotonic() < deadline_s, f"{how}: {left} are left"
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def place() -> Iterator[Path]:
    """A TMPDIR with a short path, as users have it: sockets are made below."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(120 + 12 * CYCLES)
def test_nothing_is_left_over_many_starts_and_ends(
    launch: Launch, recipe: Recipe, processes_of: ProcessesOf, place: Path
) -> None:
    recipes = [
        recipe(LITTERS, name="fresh", preload=False),
        recipe(LITTERS, name="forked", preload=True, nodes=2, nproc=1),
    ]
    kills, quiet = ("launch", "supervisor", "agent", "zygote", "worker"), ("0", "3", "TERM", "INT", "HUP")
    order = random.Random(0)
    ways = [each[number % 5] for number in range(CYCLES // 2) for each in (kills, quiet)]
    order.shuffle(ways)
    segments: dict[str, str] = {}
    for number in range(0, CYCLES, 2):
        pair = []
        for how in ways[number : number + 2]:
            path = recipes[number % 10 == 0]  # an import of torch for some of them
            pair.append((launch(path, "faults.grace=5s", env={"TMPDIR": str(place)}), how))
        for run, how in pair:
            run.wait_for_marks("up", ranks=2)
            for rank in range(2):
                segments |= dict.fromkeys((run.run.path / f"shm.{rank}").read_text().split(), how)
                assert Path((run.run.path / f"tmp.{rank}").read_text()).is_relative_to(place)
            end(run, how)
        for run, how in pair:
            run.wait()
            wait_until_gone(run, processes_of, how)
    left = {name: segments[name] for name in segments.keys() & set(names(Path("/dev/shm")))}
    assert (left, names(place)) == ({}, [])


def test_what_a_run_of_which_nobody_survived_has_left_goes_with_the_next(
    launch: Launch, recipe: Recipe, processes_of: ProcessesOf, place: Path
) -> None:
    path = recipe("import tempfile, toy\ntempfile.mkdtemp()\ntoy.mark('up')\ntoy.wait_for('go')\n", preload=False)
    killed, living = (launch(path, env={"TMPDIR": str(place)}) for _ in range(2))
    for run in (killed, living):
        run.wait_for_marks("up", ranks=2)
    pids = processes_of(killed.run_id)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # nobody has the time to clean up
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until_gone(killed, processes_of, "all")
    assert len(names(place)) == 2
    last = launch(path, env={"TMPDIR": str(place)})
    last.wait_for_marks("up", ranks=2)
    assert len(names(place)) == 2, "that of the dead is gone, that of the living is not"
    for run in (living, last):
        run.let("go")
        assert run.wait() == 0, run.text
    assert names(place) == []


@pytest.mark.timeout(60 + 10 * RESTARTS)
def test_descriptors_and_memory_of_the_agents_do_not_grow_with_the_restarts(launch: Launch, recipe: Recipe) -> None:
    run = launch(
        recipe("import toy\ntoy.mark('up')\ntoy.wait_for('go')\n", nodes=2, nproc=1, resume="self"),
        "faults.max_restarts=1000000",
    )
    seen = {}
    for attempt in range(1, RESTARTS + 2):
        run.wait_for_marks("up", ranks=2, attempt=attempt)
        if attempt in (6, RESTARTS + 1):
            seen[attempt] = [(len(names(Path(f"/proc/{pid}/fd"))), resident_bytes(pid)) for pid in long_lived(run)]
        if attempt <= RESTARTS:
            os.kill(run.happened("worker_started", attempt=attempt)[0]["pid"], signal.SIGKILL)
    run.let("go")
    assert run.wait() == 0, run.text
    early, late = seen[6], seen[RESTARTS + 1]
    assert [descriptors for descriptors, _ in early] == [descriptors for descriptors, _ in late]
    assert all(after < before + 20_000_000 for (_, before), (_, after) in zip(early, late, strict=True))


def long_lived(run: Launched) -> list[int]:
    """Supervisor, agents, zygotes."""
    agents = [int(event["pid"]) for event in run.happened("agent_started")]
    return [victim(run, "supervisor"), *agents, *map(zygote_of, agents)]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_process_that_launches_again_and_again_keeps_no_descriptor_of_it(tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text("print('done')\n")
    open_files = []
    for _ in range(6):
        run = launcher.run(script, runs_dir=tmp_path / "runs", nproc_per_node=1)
        assert run.wait() == 0, run.logs()
        open_files.append(len(names(Path("/proc/self/fd"))))
    assert len(set(open_files[1:])) == 1, f"open files after each run: {open_files}"
