"""How many ranks share the work in which way: the degrees of the device mesh. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.recipe.schema import ParallelismSection

ONE_PROCESS = ("single", "data_parallel", "split")
"""Strategies of one process, which may have several devices."""


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


def resolve_degrees(section: ParallelismSection, *, world_size: int, nodes: int) -> Degrees:
    """The degrees of a strategy on so many ranks. Raises ValueError, with the key, where they do not fit."""
    strategy, tp, pp = section.name, section.tp, section.pp
    if strategy in ONE_PROCESS:
        _refuse(section, strategy, ("dp", "fsdp", "tp", "pp"))
        if world_size != 1:
            raise ValueError(
                f"parallelism.strategy: {strategy} is for one rank, and there are {world_size}; use ddp or fsdp"
            )
        return Degrees()
    if world_size % (tp * pp):
        degrees = " x ".join(f"{name} {value}" for name, value in (("tp", tp), ("pp", pp)) if value > 1)
        raise ValueError(f"parallelism: world size {world_size} does not divide by {degrees}")
    left = world_size // (tp * pp)
    if strategy == "ddp":
        _refuse(section, strategy, ("fsdp",))
        dp, fsdp = _given(section.dp, left), 1
    elif strategy == "fsdp":
        _refuse(section, strategy, ("dp",), "; use hsdp for replicas of it")
        dp, fsdp = 1, _given(section.fsdp, left)
    else:
        dp, fsdp = _pair(section, left, nodes)
    found = Degrees(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
    if found.size != world_size:
        product = " x ".join(f"{name} {value}" for name, value in vars(found).items() if value > 1) or "1"
        raise ValueError(f"parallelism: {product} is {found.size}, and the world size is {world_size}")
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


def _refuse(section: ParallelismSection, strategy: str, axes: tuple[str, ...], hint: str = "") -> None:
    for axis in axes:
        degree = getattr(section, axis)
        if not isinstance(degree, str) and degree != 1:
            raise ValueError(f"parallelism.{axis}: {degree}, and strategy {strategy} has no {axis}{hint}")
