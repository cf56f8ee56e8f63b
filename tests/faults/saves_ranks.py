"""Faults in saves, on the real code with real ranks and files: `python saves_ranks.py FOLDER KIND:SEED ...`.

The checkpoints are in FOLDER/disk, which for the kind `full` must be a small file system of its own.

Each fault is three parts. Two ranks train and save after every step, in the background, and note the hash of every
tensor at every step; one of the saves meets the fault. What is left is damaged, where the fault is of that kind. Then
one to three ranks, with nobody's help, go on from what they find: the tensors must be those of the step that they say
it is, and the next save must work. One line in JSON per fault.

One process imports torch, stays single-threaded, and forks the ranks, as the zygote of an agent does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer would import
import torch.distributed as dist
import xxhash
from torch import nn

import jobs.durable
from jobs.agreement import Agreement
from jobs.checkpoint import Checkpoints, Saved, SaveError
from jobs.folders import Progress
from jobs.optim import adamw
from jobs.saving import Saving, Voice
from jobs.state import TrainingState
from jobs.stop import StopRequest
from jobs.tensorfile import as_bytes
from jobs.world import Meeting, World

STEPS = 4
RANKS = 2
BLOCK_BYTES = 1024
"""So that a file has many."""
BLOCKS = 20
"""Fewer than the file of a rank has."""
FILES = ("rank-0.safetensors", "rank-1.safetensors", "tensors.json", "state.json", "manifest.json")
SMALL = ("tensors.json", "state.json", ".manifest.json.tmp", ".latest.tmp")
RENAMES = (".manifest.json.tmp", "step", ".latest.tmp")
LIMIT_S = 60.0
SAVE_FAILED = 3
WRITES = os.O_WRONLY | os.O_RDWR

Fault = dict[str, Any]


# ------------------------------------------------------------------ what goes wrong, by chance


def draw(kind: str, chance: random.Random) -> Fault:
    step = chance.randint(2, STEPS)
    fault: Fault = {"kind": kind, "step": step, "ranks": chance.randint(1, 3)}
    if kind == "kill":
        rank = chance.randint(0, 1)
        where = chance.choice(("block", "block", "open")) if rank == 0 else "block"
        at = chance.choice(SMALL) if where == "open" else chance.randrange(BLOCKS)
        return {**fault, "rank": rank, "where": where, "at": at}
    if kind == "full":
        at = chance.choice(("mkdir", "rank-0.safetensors", "rank-1.safetensors", *SMALL))
        left_bytes = 0 if at in SMALL else 4096 * chance.randrange(4)
        rank = int(at == "rank-1.safetensors")
        return {**fault, "rank": rank, "at": at, "left_bytes": left_bytes, "allowed": chance.randint(0, 1)}
    if kind == "rename":
        if chance.random() < 0.5:
            return {**fault, "rank": 0, "where": "rename", "at": chance.choice(RENAMES)}
        return {**fault, "step": STEPS, "undo": chance.choice(("step", "manifest", "latest", "latest gone"))}
    assert kind in ("truncate", "flip"), kind
    return {**fault, "step": STEPS, "file": chance.choice(FILES), "share": chance.random(), "bit": chance.randrange(8)}


# ------------------------------------------------------------------ a rank


class Saboteur:
    """In a rank: does what the fault says, from the inside, where only it can know that the place is reached."""

    def __init__(self, fault: Fault, folder: Path, rank: int) -> None:
        self._fault, self._folder, self._rank = fault, folder, rank
        self._begun = False
        """The save in question has begun: its folder is there."""
        self._over = False
        self._blocks = 0

    def install(self) -> None:
        sys.addaudithook(self._audit)
        real = jobs.durable.HashedFile.write

        def write(file: Any, data: Any) -> None:
            view = memoryview(data).cast("B")
            for start in range(0, len(view), BLOCK_BYTES):
                real(file, view[start : start + BLOCK_BYTES])
                self._block(str(file._raw.name))

        jobs.durable.HashedFile.write = write  # type: ignore[method-assign]

    @property
    def _unfinished(self) -> str:
        return f"/step-{self._fault['step']}.tmp-1"

    def _block(self, path: str) -> None:
        if self._unfinished in path and path.endswith(f"rank-{self._rank}.safetensors"):
            if self._fault.get("where") == "block" and self._blocks == self._fault["at"]:
                self._kill()
            self._blocks += 1

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._over or event not in ("open", "os.rename", "os.mkdir") or "/checkpoints/" not in str(args[0]):
            return
        path, name = str(args[0]), Path(str(args[0])).name
        if event == "os.mkdir" and path.endswith(self._unfinished):
            self._begun = True
            self._reached("mkdir")
        elif event == "os.rename" and self._begun:
            self._reached(f"rename {'step' if name.startswith('step-') else name}")
        elif event == "open" and self._begun and args[2] & WRITES and not path.endswith("/filler"):
            self._reached(f"open {name}")

    def _reached(self, place: str) -> None:
        fault = self._fault
        if fault.get("rank") == self._rank and fault.get("where") in ("open", "rename"):
            if place == f"{fault['where']} {fault['at']}":
                self._kill()
        elif fault["kind"] == "full" and fault["rank"] == self._rank and place in (fault["at"], f"open {fault['at']}"):
            self._over = True
            fill(self._folder / "filler", fault["left_bytes"])
            note(self._folder, "done")

    def _kill(self) -> None:
        if self._fault.get("rank") == self._rank:
            note(self._folder, "done")
            os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path, left_bytes: int) -> None:
    """Write to a file system until it is full, and give back some pages."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() // 4096 * 4096 - left_bytes))


def notes_of(folder: Path) -> Path:
    """Not beside the folder: its disk may be full."""
    return folder.parents[1] / "notes" / folder.name


def note(folder: Path, name: str, text: str = "") -> None:
    notes_of(folder).mkdir(parents=True, exist_ok=True)
    (notes_of(folder) / name).write_text(text)


def noted(folder: Path, name: str) -> str | None:
    path = notes_of(folder) / name
    return path.read_text() if path.exists() else None


def hashes(state: TrainingState) -> dict[str, str]:
    return {
        name: xxhash.xxh3_128(as_bytes(tensor.detach().contiguous())).hexdigest()
        for name, tensor in state.tensors().items()
    }


def new_state() -> TrainingState:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.Linear(96, 8))
    return TrainingState(net, adamw(net.parameters()))


def be_rank(rank: int, size: int, *, port: int, folder: Path, fault: Fault, attempt: int) -> int:
    """Train, and save after every step. Returns the exit code."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    group = dist.new_group(backend="gloo")
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    meeting = Meeting(dist.PrefixStore("meeting", store), world)
    state = new_state()
    checkpoints = Checkpoints(folder / "checkpoints", run_id="faults", attempt=attempt, keep=STEPS, best=None)
    meeting.gather("try", lambda: checkpoints.check_writable(rank))
    choice, progress = checkpoints.resume(meeting, state, group)
    if attempt > 1:
        note(
            folder, f"resumed-{rank}", json.dumps({"step": progress.step, "hashes": hashes(state), "name": choice.name})
        )
    elif fault["kind"] != "none":
        Saboteur(fault, folder, rank).install()

    def failed(step: int, reason: str, in_a_row: int) -> None:
        if rank == 0:  # which looks for room at the next save: who comes second to remove a file may be through first
            (folder / "filler").unlink(missing_ok=True)

    def complete(saved: Saved, step: int, time_s: float, blocked_s: float) -> None:
        note(folder, f"complete-{step}")

    voice = Voice(complete=complete, failed=failed, say=lambda _: None)
    saving = Saving(checkpoints, group, voice, asynchronous=True, max_failed=fault.get("allowed", 0))
    agreement = Agreement(StopRequest(), has_trouble=lambda: saving.has_trouble)
    last = STEPS if attempt == 1 else progress.step + 1
    for step in range(progress.step + 1, last + 1):
        torch.manual_seed(step)
        state.net(torch.randn(16, 32)).square().mean().backward()
        agreement.now()
        saving.wait_for_copy()
        state.optimizer.step()
        state.optimizer.zero_grad()
        if rank == 0:
            note(folder, f"hashes-{step}", json.dumps(hashes(state)))
        if agreement.trouble:
            saving.settle(agreement)
        progress = Progress(step=step, samples_seen=16 * step)
        saving.begin(state, progress, agreement, last=False)
        with torch.no_grad():
            state.net(torch.randn(16, 32))  # what a forward changes is not what is saved
    saving.finish(agreement)
    return 0


# ------------------------------------------------------------------ the process that forks them


def fork(main: Callable[[], int], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = main()
    except SaveError:
        traceback.print_exc()
        code = SAVE_FAILED
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(size: int, folder: Path, fault: Fault, attempt: int) -> list[int]:
    """Exit codes; where one has died by a signal the others are killed, as an agent does."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = notes_of(folder).with_suffix(".log")
    pids = [
        fork(lambda rank=rank: be_rank(rank, size, port=port, folder=folder, fault=fault, attempt=attempt), log)  # type: ignore[misc]
        for rank in range(size)
    ]
    codes: dict[int, int] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(codes) < size:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if (codes and min(codes.values()) < 0) or time.monotonic() > deadline_s:
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.002)
    return [codes[pid] for pid in pids]


def damage(folder: Path, fault: Fault) -> None:
    """What the disk does to a checkpoint that was complete."""
    checkpoints = folder / "checkpoints"
    newest = checkpoints / f"step-{STEPS}"
    if fault["kind"] in ("truncate", "flip"):
        path = newest / fault["file"]
        content = bytearray(path.read_bytes())
        place = int(len(content) * fault["share"])
        if fault["kind"] == "truncate":
            del content[place:]
        else:
            content[place] ^= 1 << fault["bit"]
        path.write_bytes(content)
    elif fault.get("undo") == "step":
        newest.rename(checkpoints / f"step-{STEPS}.tmp-1")
    elif fault.get("undo") == "manifest":
        (newest / "manifest.json").rename(newest / ".manifest.json.tmp")
    elif fault.get("undo") == "latest":
        (checkpoints / "latest").write_text(f"step-{STEPS - 1}\n")
    elif fault.get("undo") == "latest gone":
        (checkpoints / "latest").unlink()


def problems(folder: Path, fault: Fault) -> list[str]:
    """Let it happen; what is not as it should be."""
    codes = run_ranks(RANKS, folder, fault, 1)
    log = notes_of(folder).with_suffix(".log")
    told = f"; {log.read_text()[-1500:]}" if log.exists() else ""
    in_process = fault["kind"] in ("kill", "full") or "where" in fault
    if in_process and noted(folder, "done") is None:
        return [f"the fault did not happen, ranks ended with {codes}{told}"]
    expected = [0, 0] if not in_process else [SAVE_FAILED] * 2
    if fault["kind"] == "full":
        expected = expected if not fault["allowed"] else [0, 0]
        if codes != expected:
            return [f"ranks ended with {codes} instead of {expected}{told}"]
    elif in_process and codes[fault["rank"]] != -signal.SIGKILL:
        return [f"rank {fault['rank']} ended with {codes} and was not killed{told}"]
    (folder / "filler").unlink(missing_ok=True)
    damage(folder, fault)
    complete = [step for step in range(1, STEPS + 1) if noted(folder, f"complete-{step}") is not None]
    damaged = fault["kind"] in ("truncate", "flip") or fault.get("undo") in ("step", "manifest")
    least = max([step for step in complete if not (damaged and step == STEPS)], default=0)

    codes = run_ranks(fault["ranks"], folder, {"kind": "none"}, 2)
    if codes != [0] * fault["ranks"]:
        return [f"the restart ended with {codes}; {log.read_text()[-1500:]}"]
    found = []
    for rank in range(fault["ranks"]):
        resumed = json.loads(noted(folder, f"resumed-{rank}") or "{}")
        step = resumed["step"]
        if step < least:
            found.append(f"rank {rank} goes on from step {step}, and step {least} was complete")
        if step and resumed["hashes"] != json.loads(noted(folder, f"hashes-{step}") or "{}"):
            found.append(f"rank {rank} has other tensors than those of step {step}")
        if noted(folder, f"complete-{step + 1}") is None:
            found.append(f"the save of step {step + 1} after the restart was not complete")
    left = [path.name for path in (folder / "checkpoints").iterdir() if ".tmp" in path.name]
    return found + [f"{name} is left" for name in left]


def main() -> None:
    base = Path(sys.argv[1])
    jobs.durable.BLOCK_BYTES = BLOCK_BYTES
    for wanted in sys.argv[2:]:
        kind, _, seed = wanted.partition(":")
        fault = draw(kind, random.Random(wanted))
        folder = base / "disk" / f"{kind}-{seed}"
        folder.mkdir(parents=True)
        notes_of(folder).mkdir(parents=True)
        begin_s = time.monotonic()
        found = problems(folder, fault)
        (folder / "filler").unlink(missing_ok=True)
        time_s = round(time.monotonic() - begin_s, 3)
        print(json.dumps({"wanted": wanted, "fault": fault, "problems": found, "time_s": time_s}), flush=True)
        if not found:
            shutil.rmtree(folder)
            shutil.rmtree(notes_of(folder))


if __name__ == "__main__":
    main()
