"""Whether this machine can be several that take logins. Apart from `ssh_hosts.py`, since tests/conftest.py asks."""

from __future__ import annotations

import os
import shutil

SSHD = "/usr/sbin/sshd"
"""Not on every user's PATH; it wants to be called by its whole path."""


def has_sshd() -> bool:
    """Whether both ends of OpenSSH are installed."""
    return shutil.which("ssh") is not None and os.access(SSHD, os.X_OK)
