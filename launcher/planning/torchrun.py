"""The line per node that starts the same workers by hand, without us. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.placeholders import attempt_argv

if TYPE_CHECKING:
    from launcher.planning.plan import Plan

TORCHRUN_PORT = 29500
"""Where the recipe fixes no port."""


def torchrun_lines(plan: Plan, *, torchrun: Sequence[str], overrides: Sequence[str], cwd: str) -> Iterator[str]:
    """One shell line for each node of the plan, to be run in `cwd`, with `torchrun` as the command of that name.

    `overrides` are all that separate the recipe file from the plan's recipe, flags included.
    """
    unset = [part for name in plan.env_unset for part in ("-u", name)]
    start = " ".join(["env", *unset, *(f"{variable.name}={_quoted(variable.value)}" for variable in plan.env)])
    before = f"{' '.join(map(_quoted, torchrun))} --nnodes {len(plan.nodes)} --node-rank"
    after = " ".join(
        _quoted(word)
        for word in [
            *("--nproc-per-node", str(plan.nproc_per_node)),
            *("--master-addr", plan.nodes[0].address),
            *("--master-port", str(plan.master_port or TORCHRUN_PORT)),
            *("--max-restarts", "0"),
            *_program(plan, overrides),
        ]
    )
    for node in plan.nodes:
        gpus = f" CUDA_VISIBLE_DEVICES={','.join(map(str, node.gpus))}" if plan.device == "cuda" else ""
        line = _after_setup(plan.setup, f"{start}{gpus} {before} {node.index} {after}")
        yield line if plan.worker.cwd == cwd else f"cd {_quoted(plan.worker.cwd)} && {line}"


def srun_line(plan: Plan, *, torchrun: Sequence[str], overrides: Sequence[str], cwd: str) -> Iterator[str]:
    """The one line that does the same on all nodes of an allocation: of `salloc`, or in a batch script."""
    assert plan.slurm is not None
    unset = [part for name in plan.env_unset for part in ("-u", name)]
    start = " ".join(["exec env", *unset, *(f"{variable.name}={_quoted(variable.value)}" for variable in plan.env)])
    nodes = len(plan.nodes)
    words = [
        *("--nproc-per-node", str(plan.nproc_per_node)),
        *("--master-port", str(plan.master_port or TORCHRUN_PORT)),
        *("--max-restarts", "0"),
        *_program(plan, overrides),
    ]
    command = (
        f"{start} {' '.join(map(_quoted, torchrun))} --nnodes {nodes} --node-rank $SLURM_NODEID "
        f"--master-addr $HEAD_NODE {' '.join(map(_quoted, words))}"
    )
    inside = "\n".join([*plan.setup, command])
    srun = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={plan.slurm.cpus_per_node}"
    head = "HEAD_NODE=$(scontrol show hostnames | head -n 1)"
    line = f"{head} {srun} bash -euo pipefail -c {_quoted(inside)}"
    yield line if plan.worker.cwd == cwd else f"cd {_quoted(plan.worker.cwd)} && {line}"


def _after_setup(setup: Sequence[str], command: str) -> str:
    """The command, after the lines that are run on each node: in the very shell that the agent runs them in."""
    if not setup:
        return command
    return f"bash -euo pipefail -c {_quoted(chr(10).join([*setup, f'exec {command}']))}"


def _program(plan: Plan, overrides: Sequence[str]) -> list[str]:
    """The program and its arguments, as torchrun takes them; by hand it is the first attempt."""
    worker = plan.worker
    if worker.kind == "job":
        return ["-m", str(worker.module), str(plan.recipe_source), *overrides]
    program = ["-m", worker.module] if worker.module is not None else [str(worker.script)]
    return [*program, *attempt_argv(worker.argv, (), attempt=1, newest=None)]


def _quoted(value: str) -> str:
    """One word of a shell, on one line."""
    if not value.isprintable():
        return "$'" + "".join(_escaped(byte) for byte in value.encode()) + "'"
    # zsh may take a leading `=` for the path of a command, which shlex does not know.
    return f"'{value}'" if value.startswith("=") and shlex.quote(value) == value else shlex.quote(value)


def _escaped(byte: int) -> str:
    """One byte inside `$'...'`."""
    return chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}"
