"""The recipe: every section, key, default and range. The one owner of what a user may write."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from launcher.recipe.units import Duration, Length


def _positive_length(length: Length) -> Length:
    if length.count <= 0:
        raise ValueError(f"{length.text!r} is not more than 0")
    return length


def _positive_duration(duration: Duration) -> Duration:
    if duration.time_s <= 0:
        raise ValueError(f"{duration.text!r} is not more than 0")
    return duration


PositiveLength = Annotated[Length, AfterValidator(_positive_length)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive_duration)]
Auto = Literal["auto"]
MAX_NODES = 10_000
MAX_NPROC = 1_024
"""Far above what anybody has: a number beyond these was not meant."""
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Scalar = str | int | float | bool
Argument = Scalar | None | tuple[str | int | float, ...]
"""The value of one argument of a script, under its name without the dashes. Items of a list stay as written."""


class Section(BaseModel):
    """A part of a recipe. Frozen; an unknown key is an error.

    The text under a field is its documentation: editors show it (schema.json) and errors quote it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class NamedSection(BaseModel):
    """A part that names something in `jobs/`; its other keys are options of that thing, checked against the catalog."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not ours: keyword arguments of the decorated function in `jobs/`."""
        return dict(self.model_extra or {})


class ModelSection(NamedSection):
    """`model:` which network, and its options."""


class DataSection(NamedSection):
    """`data:` which dataset, how much of it per step, and its options."""

    global_batch_size: PositiveInt
    """Samples per optimizer step over all ranks and accumulation; divides by world size x accumulate."""
    loader_workers: NonNegativeInt = 0
    """Loader processes per rank. 0 loads in the training process."""


class OptimizerSection(NamedSection):
    """`train.optimizer:` which optimizer, and its options (`lr` among them)."""

    name: str = "adamw"


class ScheduleSection(NamedSection):
    """`train.schedule:` how the learning rate changes, and its options."""

    name: str = "constant"
    warmup: Length = Length(0, "steps", "0 steps")
    """The learning rate grows linearly from zero over this length."""


class TrainSection(Section):
    """`train:` how long, and how each step is made."""

    until: PositiveLength
    """The total length of the training, restarts and resumes included: `8 epochs`, `10k steps`."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 = autocast in bfloat16; parameters stay in fp32."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimizer step."""
    eval_every: PositiveLength | None = Length(1, "epochs", "1 epoch")
    """How often the held-out data is evaluated; null = only at the end."""
    log_every: PositiveLength = Length(50, "steps", "50 steps")
    """How often a progress line is printed. metrics.jsonl has every step."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class ParallelismSection(NamedSection):
    """`parallelism:` how the ranks share the work, and options of that strategy."""

    name: str = Field(default="ddp", alias="strategy")


class ResourcesSection(Section):
    """`resources:` how much of a machine. Where it runs is never in a recipe."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    nproc_per_node: Annotated[int, Field(ge=1, le=MAX_NPROC)] | Auto = "auto"
    """Workers per node. auto = one per GPU of a node; on CPU one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda where every node gets a GPU, else cpu."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per worker (OMP_NUM_THREADS). auto = the CPUs this process may use / workers on this machine."""


class NetworkSection(Section):
    """`network:` how the ranks find and talk to each other."""

    preset: Literal["auto", "loopback", "ethernet", "infiniband"] = "auto"
    """Defaults for the NCCL and gloo variables. auto = loopback on one machine, else ethernet."""
    interface: str = "auto"
    """The network interface for NCCL and gloo alike, by its exact name (`eth0`)."""
    timeout: PositiveDuration = Duration(600.0, "10m")
    """How long a rank waits in a collective before the run counts as stuck."""
    master_port: Annotated[int, Field(ge=1024, le=65535)] | Auto = "auto"
    """auto = a free port, fresh for each attempt."""
    nccl: dict[str, Scalar] = {}
    """NCCL_* variables without their prefix: `{DEBUG: INFO, SOCKET_NTHREADS: 4}`."""
    gloo: dict[str, Scalar] = {}
    """GLOO_* variables without their prefix."""
    torch_nccl: dict[str, Scalar] = {}
    """TORCH_NCCL_* variables without their prefix."""


class FaultsSection(Section):
    """`faults:` what happens when something breaks or is told to stop."""

    max_restarts: NonNegativeInt = 3
    """Restarts of the whole group after a crash, over the whole run. Needs something to resume from."""
    grace: Duration | Auto = "auto"
    """How long a stop may take to save and leave. auto = 30s."""


class CheckpointSection(Section):
    """`checkpoint:` when the state is written, and what is kept."""

    every: PositiveLength | None = Length(1, "epochs", "1 epoch")
    """null = only at the end and on a stop."""
    keep: PositiveInt = 3
    """How many of the newest are kept, besides the best."""
    best: Annotated[str, Field(pattern=r"^\S+ (min|max)$")] | None = None
    """The metric that decides which one is best, and its better end: `eval/accuracy max`, `eval/loss min`."""
    init_from: str | None = None
    """Weights to start from: a run, or a checkpoint folder (with a `/`, relative to this recipe). First attempt only;
    the state of a run is never taken."""


class WandbSection(Section):
    """`tracking.wandb:` a copy of the metrics in Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto = online with a key (WANDB_API_KEY or a login), else offline."""
    project: str | None = None
    """Default: the name of the recipe."""
    entity: str | None = None
    tags: tuple[str, ...] = ()


class TrackingSection(Section):
    """`tracking:` copies of metrics.jsonl elsewhere."""

    wandb: WandbSection = WandbSection()
    tensorboard: bool = False


class ResumeSection(Section):
    """`resume:` where a script's own checkpoints are, and how it is told to go on from one."""

    newest: str
    """A pattern of paths, as in `{run_dir}/out/checkpoint-*`; the newest that matches is `{newest}`."""
    args: dict[str, Argument] = {}
    """Arguments that are added where there is one: `{resume_from_checkpoint: "{newest}"}`. `{}` for a script that reads
    LAUNCH_RESUME_FROM."""


class ProgressSection(Section):
    """`progress:` the step clock of a script."""

    log: str
    """A regular expression with one group, which finds the step in what rank 0 prints: `step (\\d+)`."""


class Recipe(Section):
    """What is trained, and how. Either `model data train`, or a `script` (or a `module`) with `args`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,40}$")]
    """First part of the run id: at most 41 letters, digits, `.`, `_`, `-`, beginning with a letter or digit."""
    extends: str | None = None
    """A recipe to start from, relative to this file. One level."""
    model: ModelSection | None = None
    data: DataSection | None = None
    train: TrainSection | None = None
    parallelism: ParallelismSection = ParallelismSection()
    resources: ResourcesSection = ResourcesSection()
    network: NetworkSection = NetworkSection()
    faults: FaultsSection = FaultsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    script: str | None = None
    """A Python file of your own, relative to this recipe. It sees torchrun's environment."""
    module: str | None = None
    """A module of your own, run as `python -m` would, in place of `script`: `pkg.train`."""
    args: dict[str, Argument] | tuple[str, ...] = ()
    """Arguments of the script: a list, unchanged, or a mapping `{lr: 1e-3, bf16: true}` that becomes `--lr 1e-3 --bf16`
    (false and null are left out). `{run_dir} {checkpoint_dir} {nodes} {nproc} {attempt} {newest}` are filled in."""
    resume: Literal["self", "lightning", "hf"] | ResumeSection | None = None
    """How a restart goes on. `self`: the script finds its own checkpoint in LAUNCH_CHECKPOINT_DIR; `lightning`, `hf`:
    theirs is switched on from outside; or `{newest, args}`. Without it nothing is restarted."""
    progress: ProgressSection | None = None
    python: str | None = None
    """Interpreter of the workers, relative to this recipe: it needs torch, and nothing of ours. Default: our own."""
    secrets: tuple[str, ...] = ()
    """Names of variables that the workers need and nothing may show. They come from your environment."""
    setup: tuple[str, ...] = ()
    """Lines of bash that are run on each node before anything else there; what they export, the workers see."""
    preload: bool | tuple[str, ...] = False
    """Workers start from a process that has imported torch (true), and these modules (a list), already."""
    env: dict[str, str] = {}
    """Environment variables of the workers."""
    workdir: str | None = None
    """Where the workers run, relative to this recipe. Default: where `launch` was called."""
    runs_dir: str | None = None
    """Where run directories are made, relative to this recipe. Default: ./runs where `launch` was called."""
    extra: dict[str, Any] = {}
    """Yours. Kept in the record, never read by us."""

    @property
    def is_script(self) -> bool:
        """Whether the workers run a file or a module of the user's own."""
        return self.script is not None or self.module is not None
