"""Kills from the inside of a worker, at a step and in a phase that a test has planned.

`HOOKS` runs in every worker before its training. A rank kills itself where the plan says: before its forward, between
two buckets of gradients (the first one is on its way to the others), before its update, in the middle of it (half of
its weights are new, and so are half of everybody else's), after it. Every rank notes which steps it has completed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outermost import OUTERMOST

VARIABLE = "KILLS_OF_THIS_TEST"
BETWEEN = ("forward", "optimizer", "updated")
INSIDE = ("bucket", "half")
"""Between two buckets, and inside the optimizer step."""

HOOKS = (
    OUTERMOST
    + r"""
import json, os, signal, sys, time
import torch, torch.distributed
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

PLAN = json.loads(os.environ.get("KILLS_OF_THIS_TEST", "[]"))
state = {"forwards": 0, "trainer": None}

def due(phase):
    # In a worker: is this the attempt, the phase and the step of a kill? Returns it.
    attempt = int(os.environ.get("LAUNCH_ATTEMPT", "0"))
    if not 0 < attempt <= len(PLAN) or state["forwards"] < 2:
        return None
    kill = PLAN[attempt - 1]
    if kill["phase"] != phase or state["trainer"].progress.step + 1 < kill["step"] or os.path.exists(note(attempt)):
        return None
    return kill

def note(attempt):
    return os.path.join(os.environ["LAUNCH_RUN_DIR"], f"kill-{attempt}")

def here(phase):
    kill = due(phase)
    if kill is not None and os.environ["RANK"] == str(kill["rank"]):
        with open(note(os.environ["LAUNCH_ATTEMPT"]), "x"):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

def forward(module, inputs):
    if not outermost():
        return
    if state["trainer"] is None:
        frame = sys._getframe()
        while type(frame.f_locals.get("self")).__name__ != "Trainer":
            frame = frame.f_back
        state["trainer"] = frame.f_locals["self"]
        # In a backward the gradients of the first layer come last: those behind it are on their way.
        next(module.parameters()).register_hook(lambda _: here("bucket"))
    state["forwards"] += 1  # the first one is a rehearsal
    here("forward")

def updated(*_):
    here("updated")
    if state["trainer"] is not None:
        name = "done-{LAUNCH_ATTEMPT}-{RANK}".format_map(os.environ)
        with open(os.path.join(os.environ["LAUNCH_RUN_DIR"], name), "w") as file:
            file.write(str(state["trainer"].progress.step + 1))

def half_of_it(update):
    def call(*lists, **options):
        kill = due("half")
        if kill is None:
            return update(*lists, **options)
        cut = len(lists[0]) // 2
        update(*(each[:cut] for each in lists), **options)
        attempt, ranks = os.environ["LAUNCH_ATTEMPT"], range(int(os.environ["WORLD_SIZE"]))
        path = os.path.join(os.environ["LAUNCH_RUN_DIR"], f"half-{attempt}-")
        open(path + os.environ["RANK"], "w").close()
        while not all(os.path.exists(f"{path}{rank}") for rank in ranks):
            time.sleep(0.001)  # so that the others are in the middle of theirs when this one dies
        here("half")
        while not os.path.exists(note(attempt)):
            time.sleep(0.001)
        update(*(each[cut:] for each in lists), **options)
    return call

torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 64  # a bucket of its own for the last layer
register_module_forward_pre_hook(forward)
register_optimizer_step_pre_hook(lambda *_: here("optimizer"))
register_optimizer_step_post_hook(updated)
torch._fused_adamw_ = half_of_it(torch._fused_adamw_)
"""
)

SITECUSTOMIZE = f"""
import os, re, sys
if "{VARIABLE}" in os.environ and re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):
    exec({HOOKS!r})
"""
"""The same for workers of real agents, which import it."""


@dataclass(frozen=True)
class Kill:
    """What happens in one attempt: from this step on, as soon as the rank comes to the phase."""

    step: int
    phase: str
    rank: int


def environment(kills: Sequence[Kill]) -> dict[str, str]:
    """What tells the workers."""
    return {VARIABLE: json.dumps([asdict(kill) for kill in kills])}


def has_happened(run_dir: Path, attempt: int) -> bool:
    """Whether the rank was about to die."""
    return (run_dir / f"kill-{attempt}").exists()


def completed(run_dir: Path, attempt: int, *, killed: int, begin: int) -> int:
    """The newest step that a survivor of an attempt has completed; `begin`: the one that it began with."""
    notes = [path for path in run_dir.glob(f"done-{attempt}-*") if path.name != f"done-{attempt}-{killed}"]
    return max([begin, *(int(path.read_text() or 0) for path in notes)])
