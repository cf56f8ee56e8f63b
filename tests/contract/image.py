"""The images of `docker/Dockerfile`, built by the engine of the tests as people build them, behind a proxy."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine import BASE, Engine

ROOT = Path(__file__).parents[2]
CPU = "launcher:cpu"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


@contextlib.contextmanager
def torch_for_cpus(engine: Engine) -> Iterator[list[str]]:
    """Arguments of the build that say where torch for CPUs is, if this machine's pip has it at hand; else none.

    It is 190 MB, and its own index is not reached from everywhere.
    """
    version = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"torch=={version[1]}+cpu"
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, wanted)
        if subprocess.run(command, capture_output=True, check=False).returncode:
            yield []
            return
        server = ThreadingHTTPServer((engine.outside, 0), functools.partial(_Silent, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            place = f"http://{engine.outside}:{server.server_port}/"
            options = ("TORCH_INDEX=", f"PIP_FIND_LINKS={place}", f"PIP_TRUSTED_HOST={engine.outside}")
            yield [word for option in options for word in ("--build-arg", option)]
        finally:
            server.shutdown()
            server.server_close()


def build_cpu(engine: Engine, torch_place: Sequence[str], *options: str, context: Path = ROOT, tag: str = CPU) -> str:
    """Build the target `cpu`; return what was printed. torch_place: of `torch_for_cpus`."""
    file = context / "docker" / "Dockerfile"
    base = ("--build-arg", f"BASE={BASE}", "--target", "cpu", "--tag", tag, "--file", str(file))
    return engine.build(*base, *torch_place, *options, str(context))


def copy_of_the_tree(folder: Path) -> Path:
    """What an image may be made of, and what must not get into it, as in a folder that people work in."""
    context = folder / "context"
    for name in ("launcher", "jobs", "recipes", "slurm", "docker"):
        shutil.copytree(ROOT / name, context / name, symlinks=True)
    for name in (".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context / name)
    for path in ROOT.glob("launch_*.py"):
        shutil.copy(path, context / path.name)
    return context
