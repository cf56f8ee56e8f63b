"""How many ranks share the work in which way: the degrees of the device mesh. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.recipe.schema import ParallelismSection

ONE_PROCESS = ("single", "data_parallel", "split")
"""Strategies of one process, which may have several devices."""
MANY_DEVICES = ("data_parallel", "split")
"""Those that use all GPUs of their node."""
WITH_FSDP = ("fsdp", "hsdp")


class DegreesError(ValueError):
    """Degrees that do not fit each other, their strategy, or the number of ranks."""

    launch_plain = True

    def __init__(self, key: str, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.key, self.message, self.hint = key, message, hint


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the axes of the mesh, from the outermost (nodes far apart) to the innermost (GPUs of one node)."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def data(self) -> int:
        """Shares into which a batch is divided: ranks that differ in tp or pp alone work on the same samples."""
        return self.dp * self.fsdp

    @property
    def model(self) -> int:
        """Ranks that hold one model together by tp and pp."""
        return self.tp * self.pp

    def __str__(self) -> str:
        """`fsdp 2 x tp 2`: those that are more than 1, else `1`."""
        return " x ".join(f"{name} {value}" for name, value in vars(self).items() if value > 1) or "1"


def resolve_degrees(section: ParallelismSection, *, world_size: int, nodes: int) -> Degrees:
    """The degrees of a strategy on so many ranks. Raises DegreesError, with the key, where they do not fit."""
    strategy, tp, pp = section.name, section.tp, section.pp
    if strategy in ONE_PROCESS:
        for axis in ("dp", "fsdp", "tp", "pp"):
            _refuse(section, axis, "strategy: ddp, or fsdp, which have many processes")
        if world_size != 1:
            what = "one process, for all GPUs of a node," if strategy in MANY_DEVICES else "one rank,"
            message = f"parallelism.strategy: {strategy} is {what} but the world size is {world_size}"
            raise DegreesError("parallelism.strategy", message, "strategy: ddp, or nodes: 1 and nproc_per_node: 1")
        return Degrees()
    if strategy not in WITH_FSDP:
        _refuse(section, "fsdp", "strategy: fsdp, or hsdp for replicas of it")
    if strategy == "fsdp":
        _refuse(section, "dp", "strategy: hsdp for replicas of it")
    if world_size % (tp * pp):
        of_model = Degrees(tp=tp, pp=pp)
        message = f"parallelism: the world size is {world_size}, which does not divide by {of_model}"
        hint = f"nodes x nproc_per_node has to be a multiple of {of_model.size}"
        raise DegreesError("parallelism.tp" if tp > 1 else "parallelism.pp", message, hint)
    left = world_size // (tp * pp)
    if strategy == "fsdp":
        dp, fsdp = 1, _given(section.fsdp, left)
    elif strategy == "hsdp":
        dp, fsdp = _pair(section, left, nodes)
    else:
        dp, fsdp = _given(section.dp, left), 1
    found = Degrees(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
    if found.size != world_size:
        given = [axis for axis in ("dp", "fsdp") if not isinstance(getattr(section, axis), str)]
        many = f" = {found.size}" if sum(value > 1 for value in vars(found).values()) > 1 else ""
        message = f"parallelism: {found}{many}, but the world size is {world_size}"
        hint = f"{' or '.join(f'{axis}: auto' for axis in given)}; or nodes x nproc_per_node = {found.size}"
        raise DegreesError(f"parallelism.{given[0]}", message, hint)
    return found


def _given(degree: int | str, default: int) -> int:
    return default if isinstance(degree, str) else degree


def _pair(section: ParallelismSection, left: int, nodes: int) -> tuple[int, int]:
    """Replicas, and ranks of each: by default one replica per node."""
    if not isinstance(section.dp, str):
        return section.dp, _given(section.fsdp, max(1, left // section.dp))
    if not isinstance(section.fsdp, str):
        return max(1, left // section.fsdp), section.fsdp
    dp = nodes if left % nodes == 0 else 1
    return dp, left // dp


def _refuse(section: ParallelismSection, axis: str, hint: str) -> None:
    degree = getattr(section, axis)
    if not isinstance(degree, str) and degree != 1:
        message = f"parallelism.{axis}: {degree}, and strategy {section.name} has no {axis}"
        raise DegreesError(f"parallelism.{axis}", message, hint)
