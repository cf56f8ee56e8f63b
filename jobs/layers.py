"""What is done to the layers of a network before it is shared. Names of parameters stay what they are.

Where they lie in memory, what is computed again in the backward, what is compiled. A block is a child of the network
that has children of its own: that of a transformer, the stem of a ResNet. What is compiled or computed again is a
block, so the gradients of one travel while the one before is computed. A plain row of layers has no blocks: it is
compiled as a whole, and computed again in about as many runs as each has layers.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import calculate_time_spent, counters
from torch.utils.checkpoint import checkpoint

from jobs.private_torch import buffers_of
from jobs.registry import OptionError
from launcher.recipe.schema import TrainSection

GRAPHS = 8
"""Shapes and modes in which a block may come: training and evaluation, whole batches and last ones."""
WHOLE = ("single", "ddp")
"""Strategies that call the network as a whole: where it is a plain row, it can be taken as one."""


def prepare_layers(net: nn.Module, train: TrainSection, *, strategy: str, is_cut: bool, device: torch.device) -> None:
    """Do what `train` says, in place. is_cut: ranks or devices hold different parts of it.

    Raises OptionError for what this network, this strategy or this machine cannot do.
    """
    if train.channels_last:
        lay_channels_last(net, with_weights=not is_cut or strategy == "split")
    keys = [key for key in ("compile", "activation_checkpointing") if getattr(train, key)]
    if keys and strategy == "data_parallel":
        raise OptionError(f"train.{keys[0]}: true does not go with strategy data_parallel; use ddp")
    takes_whole = strategy in WHOLE and not is_cut
    for key in keys:
        if not blocks_of(net) and not takes_whole:
            raise OptionError(
                f"train.{key}: true works on blocks, and this model is a plain row of layers, of which strategy "
                f"{strategy}{' with tp or pp' * (strategy in WHOLE)} takes one after the other; use a model with "
                "blocks (gpt, lstm, resnet18), or ddp without tp and pp"
            )
    if len(keys) > 1 and not blocks_of(net):
        raise OptionError(
            "train.compile and train.activation_checkpointing: this model is a plain row of layers, which can be taken "
            "as a whole, or in runs; keep one of the two"
        )
    if train.compile:
        check_compiler(device)
        compile_layers(net)
    if train.activation_checkpointing:
        recompute_layers(net)


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """Children that have children."""
    return [child for child in net.children() if next(child.children(), None) is not None]


# ---------------------------------------------------------------- memory format


def lay_channels_last(net: nn.Module, *, with_weights: bool = True) -> None:
    """Weights of convolutions, and images that come in, lie as NHWC. Raises OptionError where there are none.

    with_weights: false where ranks share the layers out: FSDP2 takes parameters only as they are by default. Then what
    comes into each convolution lies so, and what comes out follows it.
    """
    if not any(parameter.dim() == 4 for parameter in net.parameters()):
        raise OptionError("train.channels_last: true, and this model has no convolution over images")
    if with_weights:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net.register_forward_pre_hook(_images_last)
        return
    for module in net.modules():
        if any(parameter.dim() == 4 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_images_last)


def _images_last(net: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each.contiguous(memory_format=torch.channels_last) if isinstance(each, Tensor) and each.dim() == 4 else each
        for each in inputs
    )


# ---------------------------------------------------------------- computed again


def recompute_layers(net: nn.Module) -> None:
    """Keep the inputs of blocks alone for the backward, which computes the rest again.

    Raises OptionError for a network that is neither made of blocks nor a row of layers.
    """
    blocks = blocks_of(net)
    for block in blocks:
        _become(block, _recomputed)
    if not blocks:
        if not isinstance(net, nn.Sequential):
            raise OptionError(
                "train.activation_checkpointing: true, and this model is neither blocks nor a row of layers"
            )
        _become(net, _recomputed_in_runs)


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    class Recomputed(kind):  # type: ignore[misc, valid-type]
        def forward(self, *inputs: Any) -> Any:
            return _again(self, super().forward, inputs)

    return Recomputed


def _recomputed_in_runs(kind: type[nn.Module]) -> type[nn.Module]:
    class Recomputed(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden: Any) -> Any:
            layers = list(self.children())
            length = max(1, math.ceil(math.sqrt(len(layers))))
            for begin in range(0, len(layers), length):
                run = layers[begin : begin + length]
                is_last = begin + length >= len(layers)  # its backward comes first: nothing is gained
                call = functools.partial(_run, run)
                hidden = call(hidden) if is_last else _again(self, call, (hidden,))
            return hidden

    return Recomputed


def _run(layers: list[nn.Module], hidden: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def _again(module: nn.Module, forward: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    contexts = functools.partial(_contexts, module)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _same_buffers(module)


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """The second forward of a batch leaves the statistics of a batch norm as the first one has left them."""
    places = [(buffers_of(each), name) for each in module.modules() for name in buffers_of(each)]
    kept = [(buffers, name, buffers[name]) for buffers, name in places if buffers[name] is not None]
    for buffers, name, buffer in kept:
        buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer


# ---------------------------------------------------------------- compiled


def check_compiler(device: torch.device) -> None:
    """Raise OptionError where torch.compile would find no C++ compiler, or no headers of Python."""
    compiler = os.environ.get("CXX", "g++")
    missing = "" if shutil.which(compiler) else f"there is no C++ compiler ({compiler})"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not missing and not headers.is_file():
        missing = f"there are no headers of Python ({headers})"
    if missing:
        raise OptionError(
            f"train.compile: true, and {missing} on this machine; install one (Debian, Ubuntu: g++ python3-dev), or "
            "train.compile: false"
        )
    if device.type == "cpu":
        # In this process: those that torch starts for it would outlive a rank that is killed.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def compile_layers(net: nn.Module) -> None:
    """Compile each block at its first call, or the whole network where there are none.

    For each shape anew: so the numbers of a batch depend on its shape alone, and not on what this process has seen
    before it, which is different after a resume.
    """
    modules = blocks_of(net) or [net]
    # Blocks of one class share a function, and torch counts by function: beyond its limit nothing would be compiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS * len(modules))
    for module in modules:
        _become(module, _compiled)


def _compiled(kind: type[nn.Module]) -> type[nn.Module]:
    class Compiled(kind):  # type: ignore[misc, valid-type]
        forward = torch.compile(kind.forward, dynamic=False)

    return Compiled


def graphs_compiled() -> int:
    """How many graphs this process has compiled so far."""
    return int(counters["stats"]["unique_graphs"])


def compiled_record(at_first: int) -> dict[str, float] | None:
    """What this process has compiled; None where nothing was. at_first: how many graphs there were before the first
    step: whatever has come since is a recompile, for a shape or a mode that came later."""
    if not (graphs := graphs_compiled()):
        return None
    return {
        "graphs": graphs,
        "recompiles": graphs - at_first,
        "graph_breaks": sum(counters["graph_break"].values()),
        "time_s": round(calculate_time_spent().get("total_wall_time", 0.0), 1),
    }


def _become(module: nn.Module, make: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Give it a class of its own, as FSDP2 does: an attribute of the instance would not follow into a copy."""
    kind = type(module)
    if (make, kind) not in _MADE:
        made = make(kind)
        made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
        _MADE[make, kind] = made
    module.__class__ = _MADE[make, kind]


_MADE: dict[tuple[object, object], type[nn.Module]] = {}
"""One class for all blocks of a class: what is compiled for one serves the others."""
