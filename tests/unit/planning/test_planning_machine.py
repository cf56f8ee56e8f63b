"""Asking a machine: what is missing there is a fact, and no exception."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.planning.machine import limits_text, memory_limit, space_at
from launcher.planning.probes import ask_pyspy, ask_torch, resolve
from launcher.planning.wandb_login import key_source, unreachable

ROOT = Path("/")


def test_an_interpreter_without_torch_says_so(tmp_path: Path) -> None:
    """Isolated: `torch` is a file that raises, as a broken one does."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')\n")
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    broken.chmod(0o755)
    assert ask_torch(str(broken)).fault == "ImportError: libtorch.so: cannot open"


def test_an_interpreter_that_is_none_says_so(tmp_path: Path) -> None:
    assert "No such file" in ask_torch(str(tmp_path / "python")).fault
    assert ask_torch("/bin/false").fault == "its import ended with exit code 1"


def test_what_a_site_prints_besides_does_not_matter(tmp_path: Path) -> None:
    talks = tmp_path / "python"
    talks.write_text(
        "#!/bin/sh\necho Welcome\n"
        'echo \'launch-torch {"version": "2.13.0", "cuda": null, "devices": 0, "architectures": []}\'\n'
    )
    talks.chmod(0o755)
    assert ask_torch(str(talks)).version == "2.13.0"


def test_what_a_name_resolves_to_each_address_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """F033: with a resolver of our own."""
    entries = [(2, kind, 0, "", (address, 0)) for address in ("127.0.1.1", "10.0.0.1") for kind in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: entries)
    assert resolve("lovelace") == ("127.0.1.1", "10.0.0.1")


def test_a_name_that_nobody_knows_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve("lovelace") == ()


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: over.wait() and [])
    assert resolve("lovelace", limit_s=0.01) == ()
    over.set()


def test_py_spy_that_is_absent_or_may_not_look(tmp_path: Path) -> None:
    assert ask_pyspy(None) == "py-spy is not installed"
    assert "No such file" in ask_pyspy(str(tmp_path / "py-spy"))
    denied = tmp_path / "denied"
    denied.write_text("#!/bin/sh\necho 'Permission Denied: try sudo' >&2\nexit 1\n")
    denied.chmod(0o755)
    assert ask_pyspy(str(denied)) == "Permission Denied: try sudo"


def test_the_space_of_a_folder_that_is_not_there_is_that_of_the_one_above(tmp_path: Path) -> None:
    space = space_at(tmp_path / "a" / "b", ROOT)
    assert space.path == str(tmp_path / "a" / "b")
    assert space.total_bytes > 0
    assert space.writable


def test_the_space_below_a_folder_that_is_closed_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def closed(path: Path, **options: Any) -> Any:
        if path.is_relative_to(tmp_path / "closed" / "x"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "stat", closed)
    assert space_at(tmp_path / "closed" / "x" / "runs", ROOT).total_bytes > 0


def test_a_user_without_a_home_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert key_source({}) == ""


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/memory.max": "max\n"}, 1000),
        ("0::/job\n", {"sys/fs/cgroup/job/memory.max": "max\n"}, None),
        ("4:memory:/a/b\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2000\n"}, 2000),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {}, None),
    ],
)
def test_the_memory_that_control_groups_allow(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    proc = {"proc/self/cgroup": groups, "proc/meminfo": "MemTotal:       64 kB\nMemAvailable:   32 kB\n"}
    for name, text in {**proc, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def test_limits_as_people_read_them() -> None:
    limits = {"nofile": (1024, 4096), "core": (-1, -1)}
    assert limits_text(limits, "nofile") == "1,024 (hard: 4,096)"
    assert limits_text(limits, "core") == "unlimited"


def test_where_a_key_comes_from_is_said_and_nothing_of_it(tmp_path: Path) -> None:
    home = {"NETRC": str(tmp_path / "netrc")}
    assert key_source(home) == ""
    assert key_source({**home, "WANDB_API_KEY": "x" * 40}) == "WANDB_API_KEY"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert key_source(home) == str(tmp_path / "netrc")
    assert key_source({**home, "WANDB_BASE_URL": "https://other.example"}) == ""
    (tmp_path / "netrc").write_text("macdef\n")
    assert key_source(home) == ""


def test_a_server_that_does_not_answer_is_named() -> None:
    assert unreachable("http://127.0.0.1:9").startswith("127.0.0.1:9 does not answer")
