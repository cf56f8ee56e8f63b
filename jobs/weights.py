"""The fingerprint of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.mesh import Grid
from jobs.private_torch import gathered


def weights_sha256(net: nn.Module, grid: Grid | None = None) -> str:
    """SHA-256 over all tensors of the state, in the order of their names: name, type, shape, bytes.

    The same for the same numbers, however the ranks share them; all ranks of a grid together. Each tensor is gathered
    in its turn, so that no rank has to hold the whole model.
    """
    return sha256_of(_pipelined(net, grid) if grid is not None and grid.degrees.pp > 1 else _whole(net))


def sha256_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """The same of whole tensors with their names, in the order of these."""
    digest = hashlib.sha256()
    for name, tensor in named:
        here = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{here.dtype}\0{tuple(here.shape)}\0".encode())
        digest.update(here.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    state = net.state_dict()
    for name in sorted(state):
        yield name, gathered(state[name])


def _pipelined(net: nn.Module, grid: Grid) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all stages, on each of them."""
    stages, state = grid.axis("pp").get_group(), net.state_dict()
    described = {name: (str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in state.items()}
    lists = [_told(described, stage, grid, stages) for stage in range(grid.degrees.pp)]
    places = {name: (stage, *meta) for stage, of_stage in enumerate(lists) for name, meta in of_stage.items()}
    for name in sorted(places):
        stage, dtype, shape = places[name]
        if name in state:
            tensor = gathered(state[name]).detach().contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=_device(net, grid))
        dist.broadcast(tensor, group=stages, group_src=stage)
        yield name, tensor


def _told(
    described: dict[str, tuple[str, list[int]]], stage: int, grid: Grid, stages: dist.ProcessGroup
) -> dict[str, tuple[str, list[int]]]:
    """What one stage has, on all stages."""
    device = torch.device(grid.axis("pp").device_type)
    data = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=stages, group_src=stage)
    text = data if grid.place["pp"] == stage else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, group=stages, group_src=stage)
    told: dict[str, tuple[str, list[int]]] = json.loads(bytes(text.cpu().tolist()).decode())
    return told


def _device(net: nn.Module, grid: Grid) -> torch.device:
    return next((each.device for each in net.parameters()), torch.device(grid.axis("pp").device_type))
