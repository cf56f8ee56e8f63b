"""Nothing of ours reads a pickle, from a socket or from a checkpoint: what could is listed here, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("launcher", "jobs", "slurm", "launch_client.py", "launch_command.py")

MODULES = {
    "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "pickletools",
    "multiprocessing.connection", "multiprocessing.managers", "torch.distributed.rpc", "torch.package", "xmlrpc",
}  # fmt: skip
"""Importing one of these is a step towards reading a pickle, or runs code that it was sent."""
NAMES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "recv_pyobj", "unsafe_load", "full_load", "FileSystemReader", "read_pickle", "allow_pickle",
    "monitored_rendezvous", "UnsafeLoader", "FullLoader",
}  # fmt: skip
"""Functions that unpickle what others have sent or written."""
CALLS = {"torch.load", "yaml.load", "eval", "exec", "np.load", "numpy.load", "load"}
"""Calls that do so by default, or that run text. `load`: where it was imported from torch.distributed.checkpoint."""

_LIGHTNING = "the header of the script's own checkpoint, in its own process; Lightning itself loads it in this way next"
_PLANS = (
    "torch's ranks send each other the plan of a load or a save over their own group, where all of them are trusted"
)
ALLOWED = {
    ("launcher/agent/adapters/lightning.py", "torch.load"): _LIGHTNING,
    ("launcher/agent/adapters/lightning.py", "weights_only=False"): _LIGHTNING,
    ("jobs/all_reduce.py", "multiprocessing.connection"): "JSON as bytes, between a process and its forks",
    ("jobs/state.py", "load"): _PLANS,
    ("jobs/storage.py", "save"): _PLANS,
}
"""(file, what) -> why it is there."""


def uses(path: Path) -> Iterator[str]:
    """What in a file reads pickles, or might."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_dcp = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            full = {module, *(f"{module}.{alias.name}" for alias in node.names)}
            yield from full & MODULES
            yield from {alias.name for alias in node.names} & NAMES
            if module.startswith("torch.distributed.checkpoint"):
                of_dcp |= {alias.asname or alias.name for alias in node.names if alias.name in ("load", "save")}
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.attr
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS - {"load"} or name in of_dcp:
                yield name
            for keyword in node.keywords:
                if keyword.arg in ("weights_only", "allow_pickle"):
                    yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def all_uses() -> set[tuple[str, str]]:
    paths = [
        path for name in SOURCES for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    ]
    assert len(paths) > 200
    return {(str(path.relative_to(ROOT)), use) for path in paths for use in uses(path)}


def test_what_could_read_a_pickle_is_known_and_has_a_reason() -> None:
    assert all_uses() == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing import connection",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "import torch\ntorch.load(path)",
        "import torch\nx = torch.load(path, weights_only=False)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from torch.distributed.checkpoint.state_dict_loader import load\nload(state)",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "exec(text)",
    ],
)
def test_each_of_them_is_seen(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sample.py"
    path.write_text(text)
    assert list(uses(path))
