from __future__ import annotations

from hosts import make_bed
from launched import command, launch, recipe

__all__ = ["command", "launch", "make_bed", "recipe"]
