from __future__ import annotations

from launched import command, launch, recipe

__all__ = ["command", "launch", "recipe"]
