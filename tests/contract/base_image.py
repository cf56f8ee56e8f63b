"""A small image with Python, made from this machine's own distribution: no registry is needed."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

CHANGES = (
    *("--change", 'CMD ["python3"]'),
    *("--change", "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    *("--change", "ENV LANG=C.UTF-8"),
)
"""What the official images of Python set."""
_PACKAGES = "python3,python3-venv,ca-certificates"
_SMALLER = 'rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/*'
LIMIT_S = 300.0


def write(archive: Path) -> None:
    """Write its files as one archive, for `docker import`."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    assert codename, "base image: /etc/os-release names no release of Debian or Ubuntu"
    command = (
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={_PACKAGES}"),
        *("--dpkgopt=force-unsafe-io", f"--customize-hook={_SMALLER}", codename, str(archive), *_mirror(codename)),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stderr}"


def _mirror(codename: str) -> list[str]:
    """Where this machine itself gets packages of its release from; nothing: the distribution's own place."""
    command = ("apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages")
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = [words[2] for line in said.splitlines() if (words := line.split())[:2] == [codename, "main"]]
    return found[:1]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
