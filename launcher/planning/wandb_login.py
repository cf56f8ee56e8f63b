"""Whether there is a key for Weights & Biases, and a server that answers. The key itself goes nowhere.

Standard library only.
"""

from __future__ import annotations

import netrc
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

CLOUD = "https://api.wandb.ai"
PROBE_S = 2.0
"""How long the server may take to accept a connection."""


def server(env: Mapping[str, str]) -> str:
    """The server that W&B talks to."""
    return env.get("WANDB_BASE_URL") or CLOUD


def key_source(env: Mapping[str, str]) -> str:
    """`WANDB_API_KEY`, or the file that `wandb login` has written. Empty without a key."""
    if env.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    try:
        path = Path(env.get("NETRC") or Path.home() / ".netrc")
        known = netrc.netrc(path).authenticators(urlsplit(server(env)).hostname or "") is not None
    except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: a user without a home
        return ""
    return str(path) if known else ""


def unreachable(server: str) -> str:
    """Why no connection to the server can be made; empty where it can."""
    parts = urlsplit(server)
    address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
    try:
        socket.create_connection(address, timeout=PROBE_S).close()
    except OSError as error:
        return f"{address[0]}:{address[1]} does not answer: {error}"
    return ""
