from __future__ import annotations

from launched import command, launch, recipe
from ssh_hosts import make_ssh_bed

__all__ = ["command", "launch", "make_ssh_bed", "recipe"]
