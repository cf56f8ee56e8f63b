"""What an engine of the tests' own needs of the system. Standard library only: `make test-deps` runs it.

`python tests/contract/engine_packages.py` prints the packages that are missing.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = {
    "dockerd": "docker.io",
    "containerd": "containerd",
    "runc": "runc",
    "docker-init": "tini",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
"""Program -> package of Debian and Ubuntu. Of these only Debian 12 was seen to work."""


def find_program(name: str) -> str | None:
    """Where a program is; daemons are often not on the PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}")


@functools.cache
def client() -> str | None:
    """A docker client that can build with BuildKit: from version 23 on it needs a plugin for that."""
    for folder in f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}".split(":"):
        found = shutil.which("docker", path=folder)
        if found and (_major(found) < 23 or _works(found, "buildx", "version")):
            return found
    return None


def missing_packages() -> list[str]:
    """Those to install."""
    wanted = {package for program, package in _PACKAGES.items() if not find_program(program)}
    system, major = _release()
    newer = system == "ubuntu" or major >= 13
    if client() is None:
        wanted |= {"docker.io", "docker-buildx"} if newer else {"docker.io"}
        wanted |= {"docker-cli"} if system == "debian" and newer else set()
    if not (find_program("docker-compose") or _works(client() or "docker", "compose", "version")):
        wanted.add("docker-compose-v2" if system == "ubuntu" else "docker-compose")
    return sorted(wanted)


def missing() -> str:
    """Why no engine can be started here, as far as one sees without a try; empty: it can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in (*_PACKAGES, "docker") if not find_program(name)]
    return f"not installed: {', '.join(absent)} (as root: make test-deps)" if absent else ""


def _release() -> tuple[str, int]:
    """`debian` or `ubuntu`, or what is made of them; the number of the release."""
    try:
        told = platform.freedesktop_os_release()
    except OSError:
        return "", 0
    number = told.get("VERSION_ID", "").partition(".")[0]
    return told.get("ID", ""), int(number) if number.isdecimal() else 0


def _major(docker: str) -> int:
    said = subprocess.run([docker, "--version"], capture_output=True, text=True, check=False).stdout
    number = said.removeprefix("Docker version ").partition(".")[0]
    return int(number) if number.isdecimal() else sys.maxsize


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    print(*missing_packages())
