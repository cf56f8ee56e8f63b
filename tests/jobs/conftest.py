from __future__ import annotations

from ranks import forker, start

__all__ = ["forker", "start"]
