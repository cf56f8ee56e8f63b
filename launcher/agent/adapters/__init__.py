"""Saving on a stop and resuming, switched on in a user's script from outside: for Lightning and for HF's Trainer.

The wrapper loads this folder by path, under a name of its own, before the script runs. Standard library only; torch
and the framework are those that the script itself imports: one that imports neither pays nothing. The imports are
relative, since there is no `launcher` there.
"""

from __future__ import annotations

from .hf import change_trainer as _change_hf
from .hook import after_import
from .lightning import change_trainer as _change_lightning

_PLACES = {
    # The old package name is the same code, a second time, with classes of its own.
    "lightning": (("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"), _change_lightning),
    "hf": (("transformers.trainer",), _change_hf),
}


def install(adapter: str) -> None:
    """Make ready for the framework: its Trainer is changed the moment the script imports it."""
    modules, change = _PLACES[adapter]
    for module in modules:
        after_import(module, change)
