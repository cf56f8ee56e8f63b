"""The control plane of distributed PyTorch training, and its Python interface: `launcher.run("recipe.yaml", nodes=2)`.

Importing it costs nothing: what stands here is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import Run, find, run
    from launcher.errors import LaunchError, Problem, RecipeError, Refused

__version__ = "0.1.0"
__all__ = ["LaunchError", "Problem", "RecipeError", "Refused", "Run", "__version__", "find", "run"]

_FROM = {
    "Run": "launcher.api",
    "find": "launcher.api",
    "run": "launcher.api",
    "LaunchError": "launcher.errors",
    "Problem": "launcher.errors",
    "RecipeError": "launcher.errors",
    "Refused": "launcher.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_FROM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
