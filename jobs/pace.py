"""How fast a training is, in what people compare: tokens per second, and the share of what the GPUs could do (MFU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jobs import registry
from jobs.data.base import Samples
from jobs.loader import Fetch
from jobs.tasks.base import Task
from launcher.recipe.schema import ModelSection

Pace = Callable[[float], dict[str, float]]
"""Samples per second over all ranks -> metrics by their names."""

BACKWARD = 2
"""A backward has two products of matrices where the forward has one: by the inputs, and by the weights."""
TERA = 1e12
PEAKS = {
    "GB200": 2500,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H200 NVL": 835,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "A10G": 70,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "RTX 3090": 71,
    "RTX 4090": 165.2,
    "MI300X": 1307,
}
"""TFLOP/s of dense products of matrices in bf16, added up in fp32, by a part of the name that the driver gives a GPU.

As the makers publish them, half of it where that is with sparsity; measured by none of us. The longest part that fits
counts.
"""


def make_pace(
    section: ModelSection, net: nn.Module, samples: Samples, task: Task, *, device_name: str, ranks: int
) -> Pace:
    """What is told besides samples per second. `device_name`: what the driver calls the GPU of each rank; "" on CPU.

    MFU counts what the forward and backward of the model need, by its products of matrices and convolutions, against
    bf16, whatever the precision; what activation checkpointing computes again does not count.
    """
    factors: dict[str, float] = {}
    peak_flops = peak_of(device_name)
    if task.unit is None and peak_flops is None:
        return lambda rate: {}
    inputs, targets = Fetch(samples, seed=0)[0, torch.tensor([0])]
    if task.unit is not None:
        factors[f"{task.unit}_per_s"] = float(targets.numel())
    flops = None if peak_flops is None else flops_per_sample(section, net, inputs)
    if peak_flops is not None and flops:
        factors["mfu"] = flops * (1 + BACKWARD) / (peak_flops * ranks)
    return lambda rate: {name: _rounded(rate * factor) for name, factor in factors.items()}


def pace_text(values: Mapping[str, float]) -> str:
    """`5,760 tokens/s  MFU 41.2 %`, of what a pace has said; empty where that was nothing."""
    suffix = "_per_s"
    counts = [f"{value:,.0f} {name.removesuffix(suffix)}/s" for name, value in values.items() if name.endswith(suffix)]
    return "  ".join([*counts, *([f"MFU {100 * values['mfu']:.1f} %"] if "mfu" in values else [])])


def peak_of(name: str) -> float | None:
    """FLOP/s in bf16 of a GPU by its name; None where it is not known."""
    words = f" {name.replace('-', ' ')} "
    known = [part for part in PEAKS if f" {part} " in words]
    return PEAKS[max(known, key=len)] * TERA if known else None


def flops_per_sample(section: ModelSection, net: nn.Module, inputs: Tensor) -> int | None:
    """Floating-point operations of one forward of one sample; None where nobody knows them.

    Those of a model of ours are counted, on a copy without memory: `net` may hold a part of it only. A model of the
    user's own says them in an attribute `flops_per_sample`.
    """
    if section.target is not None:
        said: Any = getattr(net, "flops_per_sample", None)
        return None if said is None else int(said)
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        copy: nn.Module = registry.build("model", section.name, section.options)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        copy.eval()(inputs.to("meta"))
    return int(counter.get_total_flops())


def _rounded(value: float) -> float:
    """Four digits: the rate is not known better."""
    return float(f"{value:.4g}")
