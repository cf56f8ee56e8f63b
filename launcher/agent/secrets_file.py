"""Secrets that were left in a file for this agent alone: read, and removed. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "LAUNCH_SECRETS_FILE"
"""Where the file is. It holds one JSON object: the variables and their values."""


def take() -> str:
    """Put them into the environment of this process and remove the file. Why they are not there, else empty."""
    name = os.environ.pop(VARIABLE, None)
    if name is None:
        return ""
    path = Path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    except FileNotFoundError:
        return f"its secrets are gone ({path}): they are read once, so a node is started by the launcher alone"
    except (OSError, ValueError) as error:
        return f"its secrets cannot be read: {error}"
    os.environ.update({str(key): str(value) for key, value in values.items()})
    return ""
