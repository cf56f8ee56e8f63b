"""What a trainer works with, and at which steps what is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from jobs.checkpoint import Checkpoints
from jobs.choice import Choice
from jobs.data.base import Samples
from jobs.folders import Progress
from jobs.keeper import Keeper
from jobs.loader import Loader
from jobs.marks import Marks
from jobs.mesh import Grid
from jobs.pace import Pace
from jobs.parallel.base import Shared
from jobs.precision import Precision
from jobs.profiling import Profiler
from jobs.report import Reporter
from jobs.sampler import Sampler
from jobs.snapshots import Snapshots
from jobs.state import TrainingState
from jobs.stop import StopRequest
from jobs.tasks.base import Task
from jobs.world import World


@dataclass(frozen=True, kw_only=True)
class Calendar:
    """At which steps what is done; steps are counted from 1, None = only at the end."""

    total_steps: int
    steps_per_epoch: int
    log_every: int
    eval_every: int | None
    save_every: int | None
    snapshot_every: int | None = None
    """None = never."""

    def is_due(self, every: int | None, step: int) -> bool:
        """Whether something that is done every so many steps, and at the end, is done after this one."""
        return step == self.total_steps or (every is not None and step > 0 and step % every == 0)

    def last_due(self, every: int | None, step: int) -> int:
        """The last step up to this one after which it was due; 0: none yet."""
        return 0 if every is None else step - step % every


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a trainer works with."""

    world: World
    device: torch.device
    state: TrainingState
    """The network itself and its optimizer: their names are those of a checkpoint."""
    grid: Grid
    """Where this rank stands: its share of the batch, its part of the model."""
    shared: Shared
    """The network, as the strategy shares it among the ranks: its forward and backward involve the others."""
    task: Task
    factor: Callable[[int], float]
    """Step -> factor of the learning rate."""
    sampler: Sampler
    loader: Loader
    evaluation: Samples | None
    checkpoints: Checkpoints
    group: ProcessGroup
    """For checkpoints: waits long."""
    report: Reporter
    stop: StopRequest
    calendar: Calendar
    go_back: Callable[[str], tuple[Choice, Progress]]
    """Restores the newest checkpoint, on all ranks together; the argument is a name that no other call has."""
    on_nan: str = "stop"
    """faults.on_nan: stop, skip or rollback."""
    max_skips: int = 1
    clip_norm: float | None = None
    """train.clip_norm."""
    compiles: bool = False
    """train.compile."""
    keeper: Keeper | None = None
    """Keeps the state if another rank dies; None: nobody asks for it."""
    asynchronous: bool = True
    """checkpoint.asynchronous: saves are written while the training goes on."""
    max_failed_saves: int = 0
    snapshots: Snapshots | None = None
    """To the memory of this node; None: another rank writes them, or none are wanted."""
    on_saved: Callable[[int], None] = lambda step: None
    """Called on rank 0, in another thread, when the checkpoint of a step is complete on disk."""
    pace: Pace = lambda rate: {}
    """Samples per second -> what else is told of the speed."""
    profiler: Profiler | None = None
    """Records some steps of this rank; None: none."""
    marks: Marks = field(default_factory=Marks)
    """What the agent sees of this rank."""

    @property
    def net(self) -> nn.Module:
        """The network itself."""
        return self.state.net

    @property
    def optimizer(self) -> Optimizer:
        """Of its parameters."""
        return self.state.optimizer

    @property
    def precision(self) -> Precision:
        """Of the forward, with the scale of fp16."""
        return self.state.precision
