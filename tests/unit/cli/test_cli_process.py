"""`launch` as a process: what it imports, how it dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("pydantic", "omegaconf", "yaml", "rich", "psutil", "torch", "numpy", "wandb", "jobs", "asyncio")
REPORT = (
    "import sys; from launcher.cli.main import main; code = main({0!r}); print(code, *sys.modules, file=sys.stderr)"
)


def modules_after(arguments: list[str], home: Path) -> tuple[str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_STATE_HOME": str(home)},
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    return code, {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train.yaml", "--help"], ["ls"], ["ls", "--help"], ["status", "--help"]]
)
def test_help_and_ls_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code, modules = modules_after(arguments, tmp_path)
    assert code == "0"
    assert "click" in modules
    assert not modules & set(HEAVY)


def test_a_dry_run_imports_neither_torch_nor_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code, modules = modules_after(["train.py", "--on", "local", "--dry-run"], tmp_path)
    assert code == "0"
    assert "pydantic" in modules
    assert not modules & {"torch", "numpy", "wandb", "jobs", "rich"}


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m launcher.cli.main schema | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert len(done.stdout) == 10
    assert done.stderr == ""
