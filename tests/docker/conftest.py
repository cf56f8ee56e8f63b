"""The engine: one for the session, started by the first test that asks for it."""

from __future__ import annotations

from engine import engine, session_engine
from launched import command, launch, recipe

__all__ = ["command", "engine", "launch", "recipe", "session_engine"]
