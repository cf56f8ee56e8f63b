"""A real Docker Engine, started for the tests in namespaces of its own, and gone without a trace with them.

The machine's firewall, network and other engines are left alone: the bridge and the rules are those of its own network
namespace, its mounts end with its mount namespace, its containers with its process 1. One cable leads to this machine,
and no further: what has to be fetched while an image is built comes through a proxy (`forward_proxy.py`).
`python tests/contract/engine.py` starts one to try things with. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import base_image
import pytest
from engine_box import LIMIT_S, READY_S, Box, call, children, is_below, plain_environment
from engine_packages import SYSTEM_PATH, client, find_program, missing
from forward_proxy import ForwardProxy

BASE = "launch-test-base"
"""The image with Python and without torch, which most tests bind-mount."""
GIVEN_BASE = Path(os.environ["LAUNCH_TEST_BASE"]) if "LAUNCH_TEST_BASE" in os.environ else None
"""The archive of it, where one was made before (`python tests/contract/base_image.py FILE`): saves half a minute."""
_LOOK_EVERY_S = 0.05
_EMPTY_S = 10.0
"""How long a process that was killed may take to leave its cgroup."""
_GROUP = "launch-test-"
"""What names of our cgroups begin with; the pid of who has started the engine follows."""
_CAPPED_RUNC = """#!{python} -IS
# A machine without CAP_SYS_RESOURCE may not raise limits, and runc would refuse `memlock=-1`: cap them to ours.
import json, os, resource, sys

arguments = sys.argv[1:]
if "--bundle" in arguments:
    path = os.path.join(arguments[arguments.index("--bundle") + 1], "config.json")
    with open(path) as file:
        config = json.load(file)
    for limit in config.get("process", {{}}).get("rlimits") or []:
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"], limit["soft"] = min(limit["hard"], hard), min(limit["soft"], hard)
    with open(path, "w") as file:
        json.dump(config, file)
os.execv({runc!r}, ["runc", *arguments])
"""
_GPU_HOOK = """#!/bin/sh
# What the engine looks for before it takes `--gpus`. There is no GPU, and none is mounted.
cat > /dev/null
"""


class Engine(Box):
    """One engine. It is off until `boot`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket = folder / "docker.sock"
        self._cgroup = f"{_GROUP}{os.getpid()}-{folder.name}"
        self._daemon: subprocess.Popen[bytes] | None = None
        self.proxy: ForwardProxy | None = None
        (folder / "bin").mkdir()
        (folder / "gpu").mkdir()
        (folder / "config").mkdir()
        docker, runc = client(), find_program("runc")
        assert docker, "no docker client that can build with BuildKit: install the buildx plugin"
        assert runc, missing()
        (folder / "bin" / "docker").symlink_to(docker)
        (folder / "daemon.json").write_text("{}")
        _write_program(folder / "bin" / "runc-capped", _CAPPED_RUNC.format(python=sys.executable, runc=runc))
        _write_program(folder / "gpu" / "nvidia-container-runtime-hook", _GPU_HOOK)

    @property
    def env(self) -> dict[str, str]:
        """What whoever uses this engine has in his environment beside his own."""
        return {
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_CONFIG": str(self.folder / "config"),
            "DOCKER_BUILDKIT": "1",
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        }

    def boot(self, *, gpus: bool = False) -> None:
        """Make the namespaces and the cable, and start the daemon."""
        _remove_groups_of_the_killed()
        self.make()
        self.proxy = ForwardProxy(self.outside)
        self.start_daemon(gpus=gpus)

    def start_daemon(self, *, gpus: bool = False) -> None:
        """Start the daemon. gpus: it takes `--gpus`, as on a machine with NVIDIA's toolkit."""
        assert self._daemon is None, "the daemon runs already"
        place = self.folder
        path = f"{place / 'bin'}:{SYSTEM_PATH}"
        argv = (
            *("dockerd", "--config-file", str(place / "daemon.json"), "--host", f"unix://{self.socket}"),
            *("--data-root", str(place / "data"), "--exec-root", str(place / "exec")),
            *("--pidfile", str(place / "dockerd.pid"), "--exec-opt", "native.cgroupdriver=cgroupfs"),
            *("--cgroup-parent", f"/{self._cgroup}"),
            *("--add-runtime", f"capped={place / 'bin' / 'runc-capped'}", "--default-runtime", "capped"),
        )
        with self.log.open("ab") as log:
            self._daemon = subprocess.Popen(
                self.inside(*argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**plain_environment(), "PATH": f"{place / 'gpu'}:{path}" if gpus else path},
                start_new_session=True,
            )
        deadline_s = time.monotonic() + READY_S
        while call("docker", "version", env=self._environment()).returncode:
            assert self._daemon.poll() is None, f"dockerd has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline_s, f"dockerd is not ready after {READY_S:.0f} s:\n{self.log.read_text()}"
            time.sleep(_LOOK_EVERY_S)

    def stop_daemon(self, signum: int = signal.SIGTERM) -> None:
        """End the daemon; SIGTERM ends its containers first, SIGKILL leaves them without one."""
        assert self._daemon is not None, "the daemon does not run"
        os.kill(children(self._daemon.pid)[0], signum)
        self._daemon.wait(LIMIT_S)
        self._daemon = None

    def docker(
        self,
        *arguments: str,
        check: bool = True,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """`docker ...`. One that has to succeed (`check`) shows what it said where it did not."""
        return self.call("docker", *arguments, check=check, stdin=stdin, env=env, limit_s=limit_s)

    def call(
        self,
        *argv: str,
        check: bool = True,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Another client of this engine."""
        done = call(*argv, stdin=stdin, env={**self._environment(), **(env or {})}, limit_s=limit_s)
        said = f"{done.stdout}\n{done.stderr}"
        assert not check or done.returncode == 0, f"{' '.join(argv)}: {done.returncode}\n{said}"
        return done

    def inspect(self, name: str) -> dict[str, Any]:
        """`docker inspect` of a container, an image or a network."""
        return dict(json.loads(self.docker("inspect", name).stdout)[0])

    def pid_of(self, container: str) -> int:
        """The pid of a container's process 1 on this machine."""
        inner = str(self.inspect(container)["State"]["Pid"])
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not folder.name.isdecimal():
                    continue
                status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
                if status["NSpid"].split()[1:2] == [inner] and is_below(int(folder.name), self.init):
                    return int(folder.name)
        raise AssertionError(f"{container} has no process")

    def build(self, *arguments: str, limit_s: float = 600.0) -> str:
        """`docker build`, with the way out that this machine has: its proxy, its authorities. What it printed."""
        assert self.proxy is not None
        proxy = [word for name in ("http_proxy", "https_proxy") for word in ("--build-arg", f"{name}={self.proxy.url}")]
        bundle = Path("/etc/ssl/certs/ca-certificates.crt")
        secrets = ["--secret", f"id=ca,src={bundle}"] if bundle.exists() else []
        done = self.docker("build", "--progress=plain", *proxy, *secrets, *arguments, limit_s=limit_s)
        return done.stdout + done.stderr

    def import_base(self) -> None:
        """Make the image BASE from this machine's own distribution."""
        archive = GIVEN_BASE or self.folder / "base.tar"
        if not GIVEN_BASE:
            base_image.write(archive)
        self.docker("import", *base_image.CHANGES, str(archive), BASE)
        if not GIVEN_BASE:
            archive.unlink()

    def left(self) -> list[str]:
        """Containers, networks and volumes that somebody has made and not removed."""
        things = {
            "container": ("ps", "--all", "--format", "{{.ID}} {{.Names}}"),
            "network": ("network", "ls", "--filter", "type=custom", "--format", "{{.ID}} {{.Name}}"),
            "volume": ("volume", "ls", "--format", "{{.Name}} {{.Name}}"),
        }
        return [f"{kind} {line}" for kind, query in things.items() for line in self.docker(*query).stdout.splitlines()]

    def tidy(self) -> None:
        """Remove them."""
        for line in self.left():
            kind, name = line.split()[:2]
            force = () if kind == "network" else ("--force",)
            self.docker(kind, "rm", *force, name)

    def remove(self) -> None:
        """End everything: with process 1 all in its namespaces, and with these the mounts and the network."""
        if self._daemon is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, IndexError):
                self.stop_daemon()
        if self.proxy is not None:
            self.proxy.close()
        self.unmake()
        remove_groups(self._cgroup)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.env}


def remove_groups(name: str) -> None:
    """The cgroups of containers outlive them where the daemon was killed; they are in use while processes still end."""
    tops = [*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup") / name]
    by_s = time.monotonic() + _EMPTY_S
    while any(top.is_dir() for top in tops) and time.monotonic() < by_s:
        for top in tops:
            for folder in sorted((path for path in (top, *top.rglob("*")) if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        time.sleep(_LOOK_EVERY_S)


def _remove_groups_of_the_killed() -> None:
    """What is left of engines whose tests were killed: all but their cgroups has ended with them."""
    for folder in {*Path("/sys/fs/cgroup").glob(f"*/{_GROUP}*"), *Path("/sys/fs/cgroup").glob(f"{_GROUP}*")}:
        pid = folder.name.removeprefix(_GROUP).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            remove_groups(folder.name)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def site_packages() -> Sequence[str]:
    """Arguments of `docker run` that give a container of BASE the packages of these tests, torch among them."""
    folder = next(path for path in sys.path if path.endswith("site-packages"))
    return ("--volume", f"{folder}:/site-packages:ro", "--env", "PYTHONPATH=/site-packages")


@contextlib.contextmanager
def running_engine(*, gpus: bool = False, base: bool = True) -> Iterator[Engine]:
    """An engine, and the image BASE on it."""
    with tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True) as folder:
        engine = Engine(Path(folder))
        try:
            engine.boot(gpus=gpus)
            if base:
                engine.import_base()
            yield engine
        finally:
            engine.remove()


@pytest.fixture(scope="session")
def session_engine() -> Iterator[Engine]:
    """One for the session, started by the first test that asks for it."""
    with running_engine() as engine:
        yield engine


@pytest.fixture
def engine(session_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A real engine, which this process and what it starts use. What a test leaves on it fails the test."""
    for name, value in session_engine.env.items():
        monkeypatch.setenv(name, value)
    yield session_engine
    if left := session_engine.left():
        session_engine.tidy()
        pytest.fail(f"left behind: {', '.join(left)}")


def main() -> None:
    """Start an engine, say how to use it, and end it with the end of the input or of this process."""
    if why := missing():
        sys.exit(f"no engine can be started: {why}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_engine(gpus="--gpus" in sys.argv[1:]) as engine, contextlib.suppress(KeyboardInterrupt):
        for name, value in engine.env.items():
            print(f"export {name}={value}")
        print(f"# log: {engine.log}; proxy for builds: {engine.proxy.url if engine.proxy else ''}; image: {BASE}")
        print("# it ends with Ctrl-C", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
