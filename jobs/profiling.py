"""`profiler:` what some steps of an attempt are made of: operators, or the memory of a GPU, or a mark for Nsight.

Steps are counted from the start of the attempt. What is recorded lies in `profile/` of the run; of `tool: torch` there
are a trace (Chrome's JSON), a table of operators and a summary, which `launch report` shows.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from jobs.job import Job
from jobs.marks import Marks
from jobs.private_torch import dump_memory_history, record_memory_history
from jobs.timeline import INPUT, divide_time, top_operators
from jobs.world import World
from launcher.recipe.schema import ProfilerSection
from launcher.runs.clock import Phase
from launcher.runs.rundir import RunDir

_TABLE_ROWS = 50
_QUIET = "6"
"""Above all levels of Kineto, the library under torch.profiler."""


class ProfilerError(RuntimeError):
    """What the recipe wants of the profiler cannot be had here."""

    launch_plain = True


class Tool(Protocol):
    """Records from one moment to another."""

    def warm_up(self) -> None:
        """One step before the first that is recorded."""

    def begin(self) -> None:
        """The first step begins."""

    def next(self) -> None:
        """A step is complete, and another follows."""

    def end(self) -> dict[str, Any]:
        """Write down what was recorded; what the summary says of it."""


class Profiler:
    """Switches a tool on and off between the steps of an attempt; outside its steps it costs one comparison.

    path: of the files, without an ending.
    """

    def __init__(
        self, tool: Tool, section: ProfilerSection, path: Path, *, facts: dict[str, Any], marks: Marks
    ) -> None:
        self.recording = False
        self._tool, self._path, self._facts, self._marks = tool, path, facts, marks
        self._first, self._last = (int(text) for text in section.steps.split("-"))
        self._name = section.tool
        self._step = 0
        self._begun_s = 0.0
        self._is_over = False

    def step(self, number: int, *, at: int) -> None:
        """So many steps of this attempt are complete; 0 before the first. at: where the training stands."""
        self._step = number
        if self._is_over or number < self._first - 2:
            return
        if number == self._first - 2:
            self._tool.warm_up()
        elif number == self._first - 1:
            self._tool.begin()
            self.recording, self._begun_s = True, time.perf_counter()
        elif number < self._last:
            self._tool.next()
        else:
            self._end(at)

    def finish(self, *, at: int) -> None:
        """The attempt ends: what was recorded so far is all there is."""
        if self.recording:
            self._end(at)
        elif not self._is_over:
            print(f"profiler.steps {self._first}-{self._last}: this attempt ends after {self._step}; nothing recorded")
        self._is_over = True

    def inputs(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; the time that each is waited for belongs to the input."""
        waiting = iter(batches)
        while True:
            with record_function(INPUT):
                batch = next(waiting, None)
            if batch is None:
                return
            yield batch

    def _end(self, at: int) -> None:
        self.recording, self._is_over = False, True
        time_s = time.perf_counter() - self._begun_s
        with self._marks.during(Phase.SAVE, at):  # it may take longer than a step may
            self._path.parent.mkdir(exist_ok=True)
            told = self._tool.end()
        last = min(self._last, self._step)
        summary = {**self._facts, "tool": self._name, "steps": [self._first, last], "time_s": round(time_s, 4), **told}
        self._path.with_name(f"{self._path.name}.json").write_text(json.dumps(summary) + "\n")
        print(f"profiler: steps {self._first} to {last} of this attempt, in {self._path.parent}", flush=True)


class Operators:
    """torch.profiler: every operator and kernel of the steps."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._profile: profile | None = None
        self._is_warm = False

    def warm_up(self) -> None:
        """The profiler's own start is slow: it is not to be part of what is recorded."""
        self._is_warm = True
        self._start()

    def begin(self) -> None:
        """Record from here on."""
        if self._profile is None:
            self._start()
        else:
            self._profile.step()

    def next(self) -> None:
        """Another step."""
        assert self._profile is not None
        self._profile.step()

    def end(self) -> dict[str, Any]:
        """Write trace and table."""
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        recorded.stop()
        trace, table = (self._path.with_name(self._path.name + ending) for ending in (".trace.json.gz", ".txt"))
        recorded.export_chrome_trace(str(trace))
        on_gpu = self._device.type == "cuda"
        averages = recorded.key_averages()
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table.write_text(averages.table(sort_by=order, row_limit=_TABLE_ROWS) + "\n")
        return {
            "shares": divide_time(_events_of(recorded), on_gpu=on_gpu),
            "operators": top_operators(averages, on_gpu=on_gpu),
            "files": {"trace": trace.name, "table": table.name},
        }

    def _start(self) -> None:
        if self._device.type == "cpu":  # or it writes lines for tracers of the system; on a GPU its errors matter more
            os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        # it is stopped from outside, so there are more steps than will ever be
        wanted = schedule(wait=0, warmup=int(self._is_warm), active=1 << 30, repeat=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            self._profile = profile(activities=activities, schedule=wanted)
            self._profile.start()


def _events_of(recorded: Any) -> Any:
    """Every event; torch has no types for them."""
    return recorded.events()


class MemoryHistory:
    """Every block of GPU memory, with the stack that has asked for it; pytorch.org/memory_viz shows the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def warm_up(self) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Record from here on."""
        torch.cuda.reset_peak_memory_stats()
        record_memory_history()

    def next(self) -> None:
        """Nothing."""

    def end(self) -> dict[str, Any]:
        """Write the snapshot. PyTorch has a pickle for it, which nothing of ours ever reads."""
        snapshot = self._path.with_name(f"{self._path.name}.memory.pickle")
        dump_memory_history(snapshot)
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "files": {"snapshot": snapshot.name}}


class NsightRange:
    """The agent has started this process under `nsys`, which records between these two calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cuda: Any = torch.cuda.profiler  # torch has no types for these two
        self._ranges = cast(Any, torch.autograd.profiler.emit_nvtx)()

    def warm_up(self) -> None:
        """Nothing."""

    def begin(self) -> None:
        """Record from here on, with the name of each operator."""
        self._cuda.start()
        self._ranges.__enter__()

    def next(self) -> None:
        """Nothing."""

    def end(self) -> dict[str, Any]:
        """Nsight writes its file by itself."""
        self._ranges.__exit__(None, None, None)
        torch.cuda.synchronize()
        self._cuda.stop()
        return {"files": {"nsys": f"{self._path.name}.nsys-rep"}}


def make_profiler(job: Job, run_dir: RunDir, world: World, device: torch.device, marks: Marks) -> Profiler | None:
    """What the recipe wants of this rank; None where that is nothing. Raises ProfilerError."""
    section = job.recipe.profiler
    if section is None or world.rank not in section.ranks:
        return None
    path = run_dir.profile / f"attempt-{job.attempt}-rank-{world.rank}"
    tool = _make_tool(section.tool, path, device)
    if tool is None:
        return None
    facts = {"attempt": job.attempt, "rank": world.rank, "device": device.type}
    return Profiler(tool, section, path, facts=facts, marks=marks)


def _make_tool(name: str, path: Path, device: torch.device) -> Tool | None:
    if name == "torch":
        return Operators(path, device)
    if name == "memory":
        if device.type != "cuda":
            raise ProfilerError("profiler.tool: memory is that of a GPU, and this run is on the CPU")
        return MemoryHistory(path)
    return NsightRange(path) if device.type == "cuda" else None  # on the CPU nsys records the whole run


def watched(profiler: Profiler | None, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a step; where a profiler records, it sees how long each is waited for."""
    return batches if profiler is None or not profiler.recording else profiler.inputs(batches)
