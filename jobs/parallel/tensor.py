"""Tensor parallel: layers that the ranks of a `tp` axis compute together.

What is shared out comes in pairs: a linear layer cut by columns (`colwise`: each rank has some of its outputs), and
the next one cut by rows (`rowwise`: each has those of its inputs), with nothing in between that mixes the columns. So a
pair takes one all-reduce forward and one backward. A module says which of its layers are such pairs with a method

    tp_plan() -> {"attn.q": "colwise", ..., "attn.proj": "rowwise"}

Of an nn.Sequential they are found. All other layers are computed by all ranks of the axis alike, so they must draw the
same random numbers; a dropout within a pair therefore drops the same places of each rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from jobs.mesh import Grid
from jobs.registry import OptionError

COLWISE, ROWWISE = "colwise", "rowwise"
Plan = dict[str, str]
_KEEPS_COLUMNS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Dropout, nn.Identity)
"""What works on each number alone may stand between two layers of a pair."""


def share_layers(net: nn.Module, grid: Grid) -> Plan:
    """Share out the layers of a network, or of a stage, along `tp`, in place; names stay as they are.

    Every rank must have the same network: each takes its part of it, and nothing travels. Returns what was done.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = find_plan(net)
    styles = {COLWISE: ColwiseParallel, ROWWISE: RowwiseParallel}
    for name, style in plan.items():
        layer = net.get_submodule(name)
        parallelize_module(layer, grid.axis("tp"), styles[style](), src_data_rank=None)
    return plan


def find_plan(net: nn.Module) -> Plan:
    """Names of layers, and how each is cut."""
    return dict(_find(net, ""))


def _find(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    own = getattr(module, "tp_plan", None)
    if own is not None:
        yield from ((prefix + name, style) for name, style in own().items())
        return
    if isinstance(module, nn.Sequential):
        yield from ((prefix + name, style) for name, style in _pairs(module))
    for name, child in module.named_children():
        yield from _find(child, f"{prefix}{name}.")


def _pairs(layers: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Each linear layer that is in no pair yet and the next one, if only what keeps columns apart is between them."""
    first: str | None = None
    for name, layer in layers.named_children():
        if isinstance(layer, nn.Linear) and first is not None:
            yield first, COLWISE
            yield name, ROWWISE
            first = None
        elif isinstance(layer, nn.Linear):
            first = name
        elif not isinstance(layer, _KEEPS_COLUMNS):
            first = None


def check_plan(net: nn.Module, tp: int) -> None:
    """Raise OptionError where nothing can be shared out, or the ranks would not get equal parts: with every layer."""
    plan = find_plan(net)
    if not plan:
        raise OptionError(
            f"parallelism.tp: {tp}, and the model has no layers that can be shared out: no pairs of linear layers, and "
            "no tp_plan()"
        )
    problems = []
    for name, style in plan.items():
        layer = net.get_submodule(name)
        size = layer.out_features if style == COLWISE else layer.in_features
        assert isinstance(size, int)
        if size % tp:
            side = "outputs" if style == COLWISE else "inputs"
            problems.append(f"layer {name} has {size} {side}")
    if in_place := [name for name in plan if getattr(_following(net, name), "inplace", False)]:
        raise OptionError(
            f"parallelism.tp: {tp}, and what comes out of {', '.join(in_place)} is overwritten by an activation with "
            "inplace, which PyTorch allows of no layer that ranks share out; inplace: false, or do without tp"
        )
    if problems:
        raise OptionError(f"parallelism.tp: {tp} does not divide all layers: {'; '.join(problems)}")


def _following(net: nn.Module, name: str) -> nn.Module | None:
    """The layer after this one, where both are in a row."""
    parent, _, own = name.rpartition(".")
    row = net.get_submodule(parent)
    names = [each for each, _ in row.named_children()]
    after = names[names.index(own) + 1 :]
    return row.get_submodule(after[0]) if isinstance(row, nn.Sequential) and after else None
