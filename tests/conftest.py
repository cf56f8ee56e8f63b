"""What every test gets: a clean environment, a home of its own, and a look at what it leaves behind.

A test that needs more than Linux and Python says so: `@pytest.mark.needs("netns")`. Where that is missing the test is
skipped, and the last lines of the run say so; where LAUNCH_TEST_REQUIRE names it (CI), the run fails instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import engine_packages
import pytest
from memory_groups import make_memory_group
from sky_command import SKY
from sshd import has_sshd
from testcluster import checks
from testcluster.layout import Cluster, ClusterError, default_scratch, running_scratch

SCRUBBED_PREFIXES = ("LAUNCH_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "TP_", "WANDB_", "SLURM_", "XDG_")
SCRUBBED_NAMES = frozenset(
    {"OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NETRC"}
)
MARK = "LAUNCH_TEST_MARK"
"""In the environment of everything that a test starts, so that what it leaves behind is known as its own."""
LEAVE_S = 5.0
"""How long what a test has started may take to be gone after its end."""

GIVEN_CLUSTER = os.environ.get("LAUNCH_TEST_CLUSTER")
"""The scratch folder of a test cluster that is up already. Read before the session's environment is cleaned."""


@dataclass(frozen=True)
class Need:
    """Something that not every machine has."""

    what: str
    is_here: Callable[[], bool]
    missing: str


def _has_netns() -> bool:
    """Whether network namespaces can be made: a try, since a container may be root and still not be allowed to."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"launch-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=True)
    return made


def _has_cgroup() -> bool:
    """Whether memory cgroups can be made with a limit."""
    try:
        make_memory_group(f"launch-try-{os.getpid()}", limit_bytes=1 << 30).rmdir()
    except OSError:
        return False
    return True


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _has_slurm() -> bool:
    """Whether the test cluster can be started: all installed, and no real SLURM that it would be in the way of.

    Or whether one was given, which is up.
    """
    if GIVEN_CLUSTER:
        return running_scratch() == Path(GIVEN_CLUSTER)
    try:
        checks.refuse(Cluster(default_scratch()))
    except ClusterError:
        return False
    return _has_netns()


def _has_docker() -> bool:
    """Whether an engine can be started: all installed, and namespaces for it."""
    return not engine_packages.missing() and engine_packages.client() is not None and _has_netns()


def _has_sky() -> bool:
    """Whether SkyPilot is there, in an environment of its own."""
    return SKY.exists()


def _has_ssh() -> bool:
    """Whether hosts with an sshd of their own can be made."""
    return has_sshd() and _has_netns()


NEEDS = {
    "netns": Need("network namespaces", cache(_has_netns), "needs root and iproute2 (as root: make test-deps)"),
    "cgroup": Need("memory cgroups", cache(_has_cgroup), "needs root and a memory controller to divide"),
    "gpu": Need("CUDA and NCCL", cache(_has_gpu), "there is no GPU; plans for GPUs are tested, their runs are not"),
    "slurm": Need(
        "SLURM",
        cache(_has_slurm),
        f"needs root, no SLURM that is configured already, and as root: {checks.install_command(accounting=True)}",
    ),
    "ssh": Need(
        "SSH hosts", cache(_has_ssh), "needs root, iproute2, OpenSSH's client and server (as root: make test-deps)"
    ),
    "sky": Need("SkyPilot", cache(_has_sky), "its loader reads the tasks of --on sky: make sky-deps (460 MB)"),
    "docker": Need(
        "Docker", cache(_has_docker), engine_packages.missing() or "needs namespaces, and a docker client with BuildKit"
    ),
}


def required() -> frozenset[str]:
    """The needs that must not be skipped in this session."""
    return frozenset(filter(None, os.environ.get("LAUNCH_TEST_REQUIRE", "").replace(",", " ").split()))


def pytest_configure(config: pytest.Config) -> None:
    # In the background of a shell, or below nohup, these are ignored, and so they would be in all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line("markers", f"needs(name): one of {', '.join(NEEDS)}; skipped where that is missing")
    config.stash[_REQUIRED] = required()
    unknown = sorted(required() - NEEDS.keys())
    missing = [f"{name} ({NEEDS[name].missing})" for name in sorted(required() & NEEDS.keys()) if not _here(name)]
    if unknown or missing:
        problems = [f"there is no {name}; one of {', '.join(NEEDS)}" for name in unknown] + missing
        raise pytest.UsageError(f"LAUNCH_TEST_REQUIRE: {'; '.join(problems)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in sorted(needs_of(item)):
        if not _here(name):
            pytest.skip(f"{name}: {NEEDS[name].missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips itself although what it needs is required has failed."""
    report = yield
    must = item.config.stash[_REQUIRED]
    needed = must & needs_of(item)
    if report.skipped and needed and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, although LAUNCH_TEST_REQUIRE names {', '.join(sorted(needed))}: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine cannot run, and why."""
    terminalreporter.section("not run on this machine")
    for name, need in NEEDS.items():
        if not _here(name):
            terminalreporter.line(f"{need.what}: {need.missing}")
    if all(map(_here, NEEDS)):
        terminalreporter.line("nothing: all there is can be run here")


def needs_of(item: pytest.Item) -> set[str]:
    """What a test needs, by its markers."""
    named = {str(name) for mark in item.iter_markers("needs") for name in mark.args}
    if unknown := named - NEEDS.keys():
        raise pytest.UsageError(f"{item.nodeid} needs {unknown}, which tests/conftest.py does not know")
    return named | ({"gpu"} if item.get_closest_marker("gpu") else set())


def _here(name: str) -> bool:
    return NEEDS[name].is_here()


_REQUIRED = pytest.StashKey[frozenset[str]]()


@pytest.fixture(scope="session", autouse=True)
def _clean_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's: not his variables, not his W&B login, not his runs. Fixtures of any scope see this."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(SCRUBBED_PREFIXES) or name in SCRUBBED_NAMES:
                patch.delenv(name)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        for kind in ("STATE", "CACHE", "CONFIG", "DATA"):
            patch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
        # A short path: sockets are made below. What processes without our agent are killed over stays there, and goes.
        with tempfile.TemporaryDirectory(prefix="lt-", ignore_cleanup_errors=True) as temporary:
            patch.setenv("TMPDIR", temporary)
            yield


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's runs are known to itself alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that starts processes is over when they are; what is left is ended, and the test fails."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield
    left = _wait_for_end(lambda: processes_with(MARK, mark), LEAVE_S)
    if left:
        names = [f"{pid} ({_command(pid)})" for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left behind {LEAVE_S:.0f} s after its end: {', '.join(names)}")


@pytest.fixture
def processes_of() -> Callable[[str], list[int]]:
    """`processes_of(run_id)`: pids of all that belong to a run, on the whole machine."""
    return lambda run_id: processes_with("LAUNCH_RUN_ID", run_id)


@pytest.fixture(name="processes_with")
def _processes_with() -> Callable[[str, str], list[int]]:
    """`processes_with(variable, value)`: pids of all that were started with it."""
    return processes_with


def processes_with(name: str, value: str) -> list[int]:
    """Pids of the living processes that were started with a variable of this value."""
    wanted = f"{name}={value}".encode()
    return sorted(
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal()
        and int(folder.name) != os.getpid()
        and wanted in _read(folder / "environ").split(b"\0")  # a zombie has none
    )


def _wait_for_end(find: Callable[[], list[int]], limit_s: float) -> list[int]:
    """Wait until nothing is found, woken by the ends of processes; return what is left at the limit."""
    deadline_s = time.monotonic() + limit_s
    while (left := find()) and (remaining_s := deadline_s - time.monotonic()) > 0:
        try:
            descriptor = os.pidfd_open(left[0])
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [], remaining_s)
        os.close(descriptor)
    return left


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace(b"\0", b" ").decode(errors="replace").strip()


def _read(path: Path) -> bytes:
    """The content of a file of /proc; empty for a process that is gone or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
