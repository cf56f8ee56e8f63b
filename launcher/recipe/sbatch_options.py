"""The options of sbatch, and what to write in a recipe in place of each."""

from __future__ import annotations

from collections.abc import Mapping

PROTECTED: Mapping[str, str] = {
    "account": "use slurm.account",
    "array": "use `sweep:`",
    "batch": "use slurm.constraint",
    "begin": "use slurm.begin, or --begin",
    "chdir": "use workdir",
    "clusters": "a run stays in the cluster that this machine's slurm.conf names",
    "constraint": "use slurm.constraint",
    "container": "use slurm.container",
    "container-id": "use slurm.container",
    "cores-per-socket": "use slurm.cpus_per_node",
    "cpus-per-gpu": "use slurm.cpus_per_gpu",
    "cpus-per-task": "use slurm.cpus_per_node",
    "dependency": "use slurm.after, or --after RUN",
    "error": "the output of the job is in the run directory, slurm/; --runs-dir moves it",
    "exclusive": "use slurm.exclusive",
    "export": "use env for variables of the workers, secrets for those that nothing may show",
    "export-file": "use env",
    "get-user-env": "use setup",
    "gpus": "use slurm.gpus_per_node",
    "gpus-per-node": "use slurm.gpus_per_node",
    "gpus-per-socket": "use slurm.gpus_per_node",
    "gpus-per-task": "use slurm.gpus_per_node: every worker of a node has to see all its GPUs",
    "gres": "use slurm.gres",
    "help": "",
    "hold": "submit it, then `scontrol hold`",
    "input": "",
    "job-name": "use name, or --name",
    "kill-on-invalid-dep": "",
    "mem": "use slurm.mem",
    "mem-per-cpu": "use slurm.mem_per_cpu",
    "mem-per-gpu": "use slurm.mem_per_gpu",
    "no-kill": "a lost node ends the allocation, and the run goes on in the next one",
    "no-requeue": "use slurm.continue: none, resubmit or chain:N",
    "nodelist-file": "use nodelist",
    "nodes": "use resources.nodes, or --nodes",
    "ntasks": "use resources.nodes and resources.nproc_per_node: there is one task per node",
    "ntasks-per-core": "there is one task per node",
    "ntasks-per-gpu": "use resources.nproc_per_node: there is one task per node",
    "ntasks-per-node": "use resources.nproc_per_node: there is one task per node",
    "ntasks-per-socket": "there is one task per node",
    "open-mode": "the output of the job is always appended to",
    "output": "the output of the job is in the run directory, slurm/; --runs-dir moves it",
    "parsable": "use --json",
    "partition": "use slurm.partition",
    "propagate": "",
    "qos": "use slurm.qos",
    "quiet": "",
    "requeue": "use slurm.continue: requeue",
    "reservation": "use slurm.reservation",
    "signal": "the end of the time limit is known to the agents; use faults.grace for the time that a stop may take",
    "test-only": "use --dry-run",
    "time": "use slurm.time",
    "tres-per-task": "use slurm.gpus_per_node",
    "usage": "",
    "verbose": "",
    "version": "",
    "wait": "use --follow",
    "wrap": "use script, or module",
}
"""Name -> what to do instead. They are part of the plan, or would break what the plan says."""

ALLOWED = frozenset(
    {
        "acctg-freq",
        "bb",
        "bbf",
        "bell",
        "burst-buffer",
        "cluster-constraint",
        "comment",
        "contiguous",
        "core-spec",
        "cpu-freq",
        "deadline",
        "delay-boot",
        "distribution",
        "exclude",
        "extra",
        "extra-node-info",
        "gid",
        "gpu-bind",
        "gpu-freq",
        "gres-flags",
        "hint",
        "ignore-pbs",
        "licenses",
        "mail-type",
        "mail-user",
        "mcs-label",
        "mem-bind",
        "mincpus",
        "network",
        "nice",
        "nodefile",
        "nodelist",
        "overcommit",
        "oversubscribe",
        "power",
        "prefer",
        "priority",
        "profile",
        "reboot",
        "resv-ports",
        "segment",
        "sockets-per-node",
        "spread-job",
        "stepmgr",
        "switches",
        "thread-spec",
        "threads-per-core",
        "time-min",
        "tmp",
        "uid",
        "use-min-nodes",
        "wait-all-nodes",
        "wckey",
        "x11",
    }
)
"""The other long options, of SLURM 20.02 to 25.05."""

_LETTERS: Mapping[str, str] = {
    "A": "account", "C": "constraint", "D": "chdir", "G": "gpus", "J": "job-name", "L": "licenses", "N": "nodes",
    "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "o": "output",
    "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""Its short options. Not `-n`: every second program has one, for something else."""


def sbatch_hint(option: str) -> str:
    """What to write in place of an option of sbatch (`--time`, `mail_type`, `-p`); empty for what is none of them."""
    name = option.lstrip("-").replace("_", "-")
    if option.startswith("-") and not option.startswith("--"):
        name = _LETTERS.get(name, "")
    if name in ALLOWED:
        return f"an option of sbatch: use slurm.sbatch.{name}"
    return f"an option of sbatch: {PROTECTED[name]}" if PROTECTED.get(name) else ""
