"""The recipe: every section, key, default and range. The one owner of what a user may write."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from launcher.recipe.units import Duration, Length, NodeRange, UnfitError


def _positive_length(length: Length) -> Length:
    if length.count <= 0:
        raise ValueError(f"{length.text!r} is not more than 0")
    return length


def _positive_duration(duration: Duration) -> Duration:
    if duration.time_s <= 0:
        raise ValueError(f"{duration.text!r} is not more than 0")
    return duration


def _device(device: str) -> str:
    if re.fullmatch(DEVICE_PATTERN, device):
        return device
    meant = "did you mean 'cuda'?" if device.lower().startswith(("gpu", "nvidia", "cuda")) else ""
    hint = meant or "cuda = one GPU of NVIDIA for each worker; `cuda:1` = that one, for one worker per node"
    raise ValueError(f"{device!r} is not one of auto, cpu, cuda, cuda:N; {hint}")


def _fixed_if_one(nodes: int | NodeRange) -> int | NodeRange:
    """`4:4` is 4."""
    if isinstance(nodes, int):
        return nodes
    if nodes.max > MAX_NODES:
        raise UnfitError(f"{nodes} ends above {MAX_NODES}, the most that a run may have")
    return nodes.max if nodes.min == nodes.max else nodes


PositiveLength = Annotated[Length, AfterValidator(_positive_length)]
PositiveDuration = Annotated[Duration, AfterValidator(_positive_duration)]
Auto = Literal["auto"]
TARGET = "target"
"""The name of what is given by `target:`, a function of the user's own."""
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d{1,3})?)$"
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

    name: str = TARGET
    target: str | None = None
    """A function of your own that returns the network, in place of a name: `package.module:function`."""


class DataSection(NamedSection):
    """`data:` which dataset, how much of it per step, and its options."""

    name: str = TARGET
    target: str | None = None
    """A function of your own that returns the data, in place of a name: `package.module:function`."""
    global_batch_size: PositiveInt
    """Samples per optimizer step over all ranks and accumulation; divides by the data-parallel ranks x accumulate."""
    loader_workers: NonNegativeInt = 0
    """Loader processes per rank. 0 loads in the training process."""
    prefetch: PositiveInt = 2
    """Micro-batches that each loader process has ready."""
    pin_memory: bool | Auto = "auto"
    """Batches wait in page-locked memory, from which a GPU copies while it computes. auto = where there is a GPU."""


class TaskSection(NamedSection):
    """`train.task:` what is learned (the loss, and what is measured), and its options."""


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
    task: TaskSection | None = None
    """Default: the one that belongs to the data."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32 = products of matrices on the tensor cores of a GPU, with 10 bits of precision. bf16, fp16 = autocast in 16
    bits; parameters stay in fp32. fp16 scales the loss, and skips the steps that overflow."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimizer step; with pipeline stages (`parallelism.pp`) those that are under way together."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """The largest L2 norm that all gradients together may have; longer ones are scaled down to it."""
    activation_checkpointing: bool = False
    """Each layer's activations are computed again in the backward, in place of being kept: less memory, more time."""
    channels_last: bool = False
    """Images and convolutions lie in memory as NHWC: faster on tensor cores."""
    compile: bool = False
    """torch.compile: a slow first step, then faster ones."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time, also on a GPU; slower."""
    eval_every: PositiveLength | None = Length(1, "epochs", "1 epoch")
    """How often the held-out data is evaluated; null = only at the end."""
    log_every: PositiveLength = Length(50, "steps", "50 steps")
    """How often a progress line is printed. metrics.jsonl has every step."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class ParallelismSection(NamedSection):
    """`parallelism:` how the ranks share the work, and options of that strategy."""

    name: str = Field(default="ddp", alias="strategy")
    dp: PositiveInt | Auto = "auto"
    """Replicas. auto = what the other degrees leave; with `hsdp` one per node."""
    fsdp: PositiveInt | Auto = "auto"
    """Ranks that share one copy of parameters, gradients, optimizer. auto = what is left for fsdp and hsdp, else 1."""
    tp: PositiveInt = 1
    """Ranks that compute each layer together (tensor parallel)."""
    pp: PositiveInt = 1
    """Stages, each with some of the layers (pipeline parallel)."""
    pipeline: Literal["1f1b", "gpipe"] = "1f1b"
    """The order of forwards and backwards of the stages: 1f1b holds the activations of few micro-batches."""


class ProfilerSection(Section):
    """`profiler:` what some steps are made of."""

    steps: Annotated[str, Field(pattern=r"^[1-9]\d*-[1-9]\d*$")] = "10-15"
    """The first and the last step that is recorded, counted from the start of the attempt."""
    tool: Literal["torch", "nsys", "memory"] = "torch"
    """torch = a trace and a table of operators; memory = a snapshot of the GPU's memory; nsys = Nsight Systems around
    the workers."""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """Which ranks are recorded."""


class ResourcesSection(Section):
    """`resources:` how much of a machine. Where it runs is never in a recipe."""

    nodes: Annotated[Annotated[int, Field(ge=1, le=MAX_NODES)] | NodeRange, AfterValidator(_fixed_if_one)] = 1
    """`2`, or `1:4`: takes four nodes, goes on with as few as one when others are lost, and takes them in again."""
    nproc_per_node: Annotated[int, Field(ge=1, le=MAX_NPROC)] | Auto = "auto"
    """Workers per node. auto = one per GPU of a node; on CPU one, as for strategies of one process."""
    device: Annotated[str, AfterValidator(_device), Field(json_schema_extra={"pattern": DEVICE_PATTERN})] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`. auto = cuda where every node gets a GPU, else cpu. `cuda:1` = that GPU of this
    machine, for one worker on one node; on SLURM it is SLURM that chooses."""
    alloc: Literal["default", "expandable_segments"] = "default"
    """How PyTorch holds the memory of a GPU. expandable_segments = blocks that grow: less is lost between them."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads per worker (OMP_NUM_THREADS). auto = the CPUs this process may use / workers on this machine."""

    @property
    def max_nodes(self) -> int:
        """How many nodes the run has when all are there."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.max

    @property
    def min_nodes(self) -> int:
        """With how few it goes on."""
        return self.nodes if isinstance(self.nodes, int) else self.nodes.min

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes than it wants."""
        return self.min_nodes < self.max_nodes


class NetworkSection(Section):
    """`network:` how the ranks find and talk to each other."""

    preset: Literal[
        "auto",
        "loopback",
        "ethernet",
        "infiniband",
        "roce",
        "aws-efa",
        "gcp-gib",
        "gcp-tcpxo",
        "gcp-tcpx",
        "azure-nd",
        "oci-roce",
        "coreweave",
    ] = "auto"
    """What the way between nodes needs of NCCL's variables, and of a container. auto = loopback on one machine; on
    hosts of Docker and ssh what all of them have, which NCCL finds by itself or a script there sets; else ethernet."""
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
    rescue: bool | Auto = "auto"
    """When a rank dies, the others' newest state goes to memory, and the restart goes on from it: no step is lost.
    auto = for recipes that train a model on CPU; on GPUs it costs one wait of the host for its gradients per step."""
    hang_timeout: PositiveDuration | Auto | None = "auto"
    """Without a step for so long, the run hangs: all stacks are written down and the culprit is named. auto = learned
    from the times of its steps; the start, the first hundred steps, evaluations and saves have limits of their own.
    null = never. A script needs a step clock (`progress:` or launch_client) for auto; with a time of your own its
    output counts as progress."""
    on_hang: Literal["auto", "report", "restart"] = "auto"
    """What follows a hang: `restart` ends the attempt, `report` only says it. auto = restart where there is a step
    clock and something to resume from, else report."""
    preflight: bool = False
    """Before the first attempt on several nodes, each is measured and reaches for all others over the interface of the
    collectives, within seconds: a node or a link that does not do ends the run at once, by name."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or a gradient that is not finite, decided once for all ranks before the weights change: `stop` ends the
    run; `skip` leaves out this batch; `rollback` goes back to the newest checkpoint and leaves out the batches from
    there to here."""
    max_skips: PositiveInt = 10
    """How many batches in a row `skip`, or how many rollbacks without a new checkpoint in between, before it stops."""


class CheckpointSection(Section):
    """`checkpoint:` when the state is written, and what is kept."""

    every: PositiveLength | None = Length(1, "epochs", "1 epoch")
    """null = only at the end and on a stop."""
    keep: PositiveInt = 3
    """How many of the newest are kept, besides the best."""
    best: Annotated[str, Field(pattern=r"^\S+ (min|max)$")] | None = None
    """The metric that decides which one is best, and its better end: `eval/accuracy max`, `eval/loss min`."""
    asynchronous: bool = True
    """Written in the background, while the training goes on."""
    memory_every: PositiveLength | None = None
    """How often the state is also copied to the memory of each node (/dev/shm), for restarts that find no survivor."""
    max_failed_saves: NonNegativeInt = 0
    """How many saves in a row may fail before the run ends. Each is said, loudly."""
    store: Annotated[str, Field(pattern=r"^(shared|replicate|[a-z][a-z0-9+.-]*://[^@\s]*)$")] = "shared"
    """Where they are. `shared`: in the run directory, which all nodes must see. `replicate`: without a shared file
    system, whole on the disks of two nodes. A URL (`s3://bucket/runs`, `gs://...`, `file:///path`): on node 0's disk,
    and the newest one, in the background, there as well; a run whose disks have none fetches it. By fsspec."""
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
    watch: PositiveDuration | None = Duration(10.0, "10s")
    """How often each node measures its devices (NVML; /proc on CPU): use, memory, power, clocks. null = never."""


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


class LimitsSection(Section):
    """`limits:` how much a run may use in all, restarts and requeues included. What is reached first ends it, saved."""

    wall: PositiveDuration | None = None
    """Time with workers, over all allocations: `48h`."""
    gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """GPUs x hours with workers, over all allocations."""
    until: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?$")] | None = None
    """A moment, in the time of the machine that launches: `2026-12-24T08:00`."""


class ContainerSection(Section):
    """`slurm.container:` the workers' node runs inside an image; what belongs to SLURM stays outside."""

    runtime: Literal["pyxis", "apptainer"]
    """pyxis = `srun --container-image` (enroot); apptainer = `apptainer exec`."""
    image: str
    """`nvcr.io#nvidia/pytorch:24.10-py3` or a `.sqsh` for pyxis, a `.sif` for apptainer."""
    mounts: tuple[str, ...] = ()
    """`/data`, `/data:/mnt/data` or `/data:/data:ro`. The run directory, workdir and code are there anyway."""
    args: tuple[str, ...] = ()
    """Further arguments of the runtime: `[--nv]`."""


class SlurmSection(Section):
    """`slurm:` what a job asks of the scheduler. It counts with `--on slurm`, `here`, or a profile of SLURM only."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: PositiveDuration | None = None
    """Limit of one allocation (`--time`). The run goes on in the next one: see `continue` and `limits`."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs of each node; 0 or none = CPU. Becomes `--gpus-per-node`, or `--gres` where `gres` is given."""
    gres: str | None = None
    """In place of `--gpus-per-node`, for sites that want it so: `gpu:a100:4`."""
    cpus_per_node: PositiveInt | None = None
    """CPUs of each node for all its workers (`--cpus-per-task` of its one agent)."""
    cpus_per_gpu: PositiveInt | None = None
    """CPUs for each GPU; on CPU for each worker. Not together with `cpus_per_node`."""
    mem: str | None = None
    """Memory of each node (`64G`; `0` = all). At most one of mem, mem_per_cpu, mem_per_gpu."""
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    exclusive: bool = False
    """The nodes are not shared with other jobs."""
    sbatch: dict[str, Scalar | None] = {}
    """Any other flag of sbatch, by its long name without dashes: `{comment: "exp 7", nice: 100}`."""
    template: str | None = None
    """A batch script of the site's, relative to this file, in place of slurm/batch.sh.j2."""
    continue_: Annotated[str, Field(pattern=r"^(auto|none|requeue|resubmit|chain:[1-9][0-9]{0,2})$")] = Field(
        default="auto", alias="continue"
    )
    """How a run goes on after its time limit, a preemption or a lost node: `requeue` (the same job again), `resubmit`
    (a new job), `chain:N` (N jobs at once, each after the one before), `none`. auto = what the site allows."""
    begin: str | None = None
    """Not before this moment (`--begin`): `now+1hour`, `2026-12-24T08:00`."""
    after: str | None = None
    """Not before this run has ended well: a run, or the id of a job (`--after`)."""
    container: ContainerSection | None = None


class SkySection(Section):
    """`sky:` machines that SkyPilot rents for the run. It counts with `--on sky`, or a profile of it, only."""

    infra: str | None = None
    """Whose machines: `aws`, `gcp/us-central1`, `lambda`, `k8s`. Default: the cheapest that SkyPilot has access to."""
    accelerators: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]*(:[1-9]\d*)?$")] | None = None
    """GPUs of each node, by SkyPilot's name: `H100:8`. None = CPU."""
    cpus: Annotated[str, Field(pattern=r"^[1-9]\d*\+?$")] | None = None
    """CPUs of each node: `8`, or at least so many: `8+`."""
    memory: Annotated[str, Field(pattern=r"^[1-9]\d*\+?$")] | None = None
    """Memory of each node in GB: `64`, `64+`."""
    instance_type: str | None = None
    """In the cloud's own words, in place of accelerators, cpus and memory: `p5.48xlarge`; needs `infra`."""
    image: str | None = None
    """The container that is the machine: `nvcr.io/nvidia/pytorch:25.01-py3`. It has torch, bash and apt, and nothing of
    ours. `ami-...` and other ids of a cloud's own images stand as they are. Default: SkyPilot's image."""
    disk_size: PositiveInt | None = None
    """Disk of each node in GB."""
    network_tier: Literal["auto", "standard", "best"] = "auto"
    """best = the fast fabric between nodes; an error where a cloud has none. auto = best for several nodes with GPUs
    where `infra` is aws, gcp, oci, or nebius with eight GPUs per node."""
    spot: bool = False
    """Cheaper machines that may be taken away. The run goes on on others, from `checkpoint.store: URL`."""
    managed: bool | Auto = "auto"
    """SkyPilot's jobs controller watches over the run, and rents other machines when some are lost. auto = for spot."""
    job_recovery: str | None = None
    """How a managed run gets other machines: `EAGER_NEXT_REGION`, `FAILOVER`. Default: SkyPilot's."""
    max_hourly_cost: Annotated[float, Field(gt=0)] | None = None
    """Machines that cost more US dollars per hour, each, are not taken."""
    autostop: PositiveDuration = Duration(600.0, "10m")
    """How long idle machines are kept, so that the record comes home; then they are taken down."""
    resources: dict[str, Any] = {}
    """Any other key of SkyPilot's `resources`, as it stands in its documentation: `{disk_tier: high}`."""
    file_mounts: dict[str, Any] = {}
    """Folders and buckets that the machines see: `{/data: s3://bucket}`, as in SkyPilot's `file_mounts`."""
    setup: Auto | tuple[str, ...] = "auto"
    """Lines of bash, once on each machine before the run; of a script, in the copy of its code. auto = what Python
    lacks of torch and the like is installed."""
    python: str = "auto"
    """Interpreter of the workers there. auto = the image's `python3`; without an image, of what `setup` makes."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 29400
    """Of the head agent, on node 0."""
    command: str = "sky"
    """SkyPilot's command on this machine: a name on PATH, or a path."""


class SshSection(Section):
    """`ssh:` machines that the system's OpenSSH reaches, a node on each. Counts with `--on ssh`, or a profile of it."""

    hosts: tuple[Annotated[str, Field(pattern=r"^[^-\s]\S*$")], ...] = ()
    """Destinations, node 0 first: names of your ssh config, host names, addresses, `user@host`."""
    config: str | None = None
    """An ssh config in place of ~/.ssh/config, relative to this file."""
    python: str | None = None
    """Interpreter on the hosts, the same path on each; it needs torch, and nothing of ours. Default: as on this
    machine."""


class DockerSection(Section):
    """`docker:` the containers of a run. It counts with `--on docker`, or a profile of Docker only."""

    image: str | None = None
    """What the workers run in: it needs torch. Default: the one that docker/Dockerfile makes, `launcher:cpu` or
    `launcher:cuda`."""
    hosts: tuple[Annotated[str, Field(pattern=r"^[^-\s]\S*$")], ...] = ()
    """Machines that the system's OpenSSH reaches (`ssh.config` counts), each with an engine of its own, one node on
    each. None: all nodes are on this machine."""
    mounts: tuple[str, ...] = ()
    """Data: `/data`, `/data:/mnt/data` or `/data:/data:ro`. The run directory, workdir and code are there anyway."""
    shm_size: Annotated[str, Field(pattern=r"^(auto|host|\d+(\.\d+)?\s*[kKmMgGtT]?([iI]?[bB])?)$")] = "auto"
    """Shared memory of each container, for loader workers and NCCL: `16GiB`. auto = a quarter of the memory of the
    machine. host = that of the machine (`--ipc host`)."""
    network: str = "auto"
    """auto = a network for the run, where one machine has several nodes; that of the machine (`host`) on hosts, which
    need it. Else the name of a network."""
    args: tuple[str, ...] = ()
    """Further arguments of `docker run`: `[--env, HF_HOME=/data/hf]`."""
    user: str = "auto"
    """Whom the files of a run belong to. auto = you; image = the user of the image; or `UID:GID`."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When the image is fetched from its registry, before anything is started."""
    code: Literal["mount", "image"] = "mount"
    """Where workdir and code come from: mounted at their own paths, or in the image already."""


class SweepSection(Section):
    """`sweep:` many runs of this recipe, each with values of its own: grid, list or zip, or all pairs of several."""

    grid: dict[str, tuple[Argument, ...]] = {}
    """Every combination: `{train.optimizer.lr: [1e-3, 1e-2], model.hidden: [64, 128]}` are four points."""
    zip: dict[str, tuple[Argument, ...]] = {}
    """The first values together, then the second ones: lists of one length."""
    list: tuple[dict[str, Argument], ...] = ()
    """The points themselves: `[{train.optimizer.lr: 1e-3, model.hidden: 64}, ...]`."""
    max_parallel: PositiveInt | None = None
    """How many run at a time. Default: on SLURM as many as it starts, on one machine as many as fit."""
    metric: Annotated[str, Field(pattern=r"^\S+ (min|max)$")] | None = None
    """What `launch ls SWEEP` shows and sorts by. Default: `checkpoint.best`."""


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
    profiler: ProfilerSection | None = None
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
    limits: LimitsSection = LimitsSection()
    slurm: SlurmSection = SlurmSection()
    sky: SkySection = SkySection()
    ssh: SshSection = SshSection()
    docker: DockerSection = DockerSection()
    sweep: SweepSection | None = None
    prepare: tuple[str, ...] = ()
    """Lines of bash, run once per launch where `launch` is called (a login node), before anything is submitted: what
    nodes without internet need. They see LAUNCH_RUN_DIR."""
    internet: bool = True
    """false: nodes reach nothing outside. W&B and Hugging Face work offline then, and nothing is downloaded there."""
    scratch: str | None = None
    """Fast local folder of a node, as bash writes it: `/scratch/$SLURM_JOB_ID`. Temporary files go there (TMPDIR)."""
    extra: dict[str, Any] = {}
    """Yours. Kept in the record, never read by us."""

    @property
    def is_script(self) -> bool:
        """Whether the workers run a file or a module of the user's own."""
        return self.script is not None or self.module is not None


ExecutorName = Literal["slurm", "local", "here", "ssh", "sky", "docker"]


class Profile(Section):
    """A site: which executor, and what is said for every run there. The lowest layer: a recipe says it better."""

    executor: ExecutorName
    """What starts the agents: slurm, local (this machine), here (the allocation that `launch` is called in), docker,
    ssh, or sky."""
    description: str = ""
    """A line for `launch list profiles`."""
    slurm: SlurmSection = SlurmSection()
    sky: SkySection = SkySection()
    ssh: SshSection = SshSection()
    docker: DockerSection = DockerSection()
    resources: ResourcesSection = ResourcesSection()
    network: NetworkSection = NetworkSection()
    faults: FaultsSection = FaultsSection()
    limits: LimitsSection = LimitsSection()
    tracking: TrackingSection = TrackingSection()
    env: dict[str, str] = {}
    """Environment variables of the workers. Those of a recipe are added."""
    secrets: tuple[str, ...] = ()
    """Names of variables that the workers need and nothing may show. They come from your environment."""
    setup: tuple[str, ...] = ()
    """Lines of bash that are run on each node before anything else there (modules, conda). Those of a recipe follow."""
    prepare: tuple[str, ...] = ()
    """Lines of bash, run once per launch where `launch` is called. Those of a recipe follow."""
    python: str | None = None
    """Interpreter of the workers of scripts, relative to this file. Default: our own. As `slurm.container` it does not
    count for a recipe that trains a model: the built-in program has the launcher's own environment."""
    runs_dir: str | None = None
    """Where run directories are made, relative to this file: a file system that every node sees."""
    scratch: str | None = None
    """Fast local folder of a node, as bash writes it: `/scratch/$SLURM_JOB_ID`."""
    internet: bool = True
    """false: nodes reach nothing outside. W&B and Hugging Face work offline then."""
