"""What the tests of the agent share."""

from __future__ import annotations

TOKEN = bytes(range(32))
"""Of every run here."""
