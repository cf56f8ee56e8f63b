"""Which code a run is: what is copied, what is linked, what is left out, and what counts as a change."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.planning import codefacts
from launcher.planning.code import CodeChanges, CodeFacts, CodeSource, code_changes
from launcher.planning.codefacts import gather_code, package_code


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a script, a package and data that git ignores."""
    root = tmp_path / "project"
    for path, text in {
        "train.py": "import pkg\n",
        "pkg/__init__.py": "",
        "untracked.py": "x = 1\n",
        "data/big.bin": "0" * 1000,
        "pkg/_built.so": "elf",
        "pkg/__pycache__/a.pyc": "b",
        ".cache/x": "y",
        ".gitignore": "data/\n*.so\n*.pyc\n.cache/\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "init", "-q")
    git(root, "add", "train.py", "pkg/__init__.py", ".gitignore")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


def source(root: Path, **fields: Any) -> CodeSource:
    known: dict[str, Any] = {
        "root": str(root),
        "script": str(root / "train.py"),
        "module": None,
        "runs_dir": str(root / "runs"),
    }
    return CodeSource(**{**known, **fields})


def test_tracked_and_untracked_files_are_copied_and_what_git_ignores_is_linked(tree: Path) -> None:
    code = gather_code(source(tree))
    assert code.snapshot
    assert sorted(code.files) == [".gitignore", "pkg/__init__.py", "train.py", "untracked.py"]
    assert code.links == {"data": f"{tree}/data", "pkg/_built.so": f"{tree}/pkg/_built.so"}
    assert code.size_bytes == sum((tree / path).stat().st_size for path in code.files)


def test_outputs_that_nobody_has_ignored_are_linked_unless_they_are_tracked(tree: Path) -> None:
    """`launch train.py > train.log` changes that file while the run runs: that is no change of the code."""
    (tree / "train.log").write_text("")
    (tree / "requirements.txt").write_text("torch\n")
    git(tree, "add", "requirements.txt")
    code = gather_code(source(tree))
    assert "requirements.txt" in code.files
    assert "train.log" not in code.files
    assert code.links["train.log"] == f"{tree}/train.log"


def test_run_directories_are_no_code(tree: Path) -> None:
    """Neither where runs are made now, nor where they were made before."""
    for folder in ("runs/a", "old/b"):
        (tree / folder).mkdir(parents=True)
        for name in ("plan.json", "resolved.yaml", "launch.json", "code.py"):
            (tree / folder / name).write_text("")
    (tree / "old" / "kept.py").write_text("")
    files = gather_code(source(tree)).files
    assert "old/kept.py" in files
    assert not [path for path in files if path.startswith(("runs/", "old/b/"))]


def test_files_that_hold_secrets_stay_where_they_are(tree: Path) -> None:
    """F060: those with the name of one are left out; where another one holds one, nothing is copied."""
    for name in (".env", "server.pem", "id_rsa"):
        (tree / name).write_text("canary")
    from_now = source(tree, holds_secret=lambda content: b"canary" in content)
    code = gather_code(from_now)
    assert set(code.skipped) == {".env", "server.pem", "id_rsa"}
    assert not code.skipped.keys() & code.files.keys()
    (tree / "settings.py").write_text("KEY = 'canary'")
    code = gather_code(from_now)
    assert not code.snapshot, "a copy without it could not be imported"
    assert code.reason == "settings.py holds the value of a secret"


def test_a_repository_inside_is_linked_and_said(tree: Path) -> None:
    inner = tree / "vendor"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "lib.py").write_text("")
    code = gather_code(source(tree))
    assert "repository" in code.skipped["vendor"]
    assert code.links["vendor"] == f"{tree}/vendor"
    assert "vendor/lib.py" not in code.files


def test_a_deleted_file_is_no_part_and_a_link_is_its_text(tree: Path) -> None:
    (tree / "pkg/__init__.py").unlink()
    (tree / "link.py").symlink_to("train.py")
    code = gather_code(source(tree))
    assert "pkg/__init__.py" not in code.files
    assert code.files["link.py"] == "-> train.py"


def test_a_script_that_is_a_link_is_copied_with_what_it_means_or_not_at_all(tree: Path, tmp_path: Path) -> None:
    (tree / "inside.py").symlink_to("train.py")
    assert gather_code(source(tree, script=str(tree / "inside.py"))).snapshot
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "real.py").write_text("x = 1")
    (tree / "outside.py").symlink_to("../other/real.py")
    code = gather_code(source(tree, script=str(tree / "outside.py")))
    assert code.reason == f"outside.py is a link to {tmp_path}/other/real.py, which is no part of it"
    assert (code.root, list(code.files)) == (f"{tmp_path}/other", ["real.py"])


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("SIZE_LIMIT_BYTES", 10, "the largest file: .gitignore"), ("COUNT_LIMIT", 2, "4 files, more than 2")],
)
def test_what_is_too_big_is_not_copied_and_the_reason_helps(
    tree: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, reason: str
) -> None:
    monkeypatch.setattr(codefacts, limit, value)
    code = gather_code(source(tree))
    assert not code.snapshot
    assert reason in code.reason
    assert sorted(code.files) == ["pkg/__init__.py", "train.py", "untracked.py"]


def test_without_git_the_python_files_of_the_script_are_watched(tmp_path: Path) -> None:
    for name in ("train.py", "pkg/a.py", "pkg/data.txt", ".hidden/b.py", "venv/c.py", "site-packages/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    code = gather_code(source(tmp_path))
    assert (code.snapshot, code.reason) == (False, "it is no git repository")
    assert sorted(code.files) == ["pkg/a.py", "train.py"]


def test_a_walk_is_bounded_and_stops_at_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}").mkdir()
        (tmp_path / f"{number:02}" / "a.py").write_text("")
    monkeypatch.setattr(codefacts, "LIVE_COUNT_LIMIT", 5)
    assert sorted(gather_code(source(tmp_path)).files) == [f"{number:02}/a.py" for number in range(5)]
    monkeypatch.setattr(codefacts, "LIVE_FOLDERS_LIMIT", 3)
    assert sorted(gather_code(source(tmp_path)).files) == ["00/a.py", "01/a.py"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"script": "/elsewhere/train.py"}, "there is no /elsewhere/train.py"),
        ({"script": __file__}, "lies outside the workdir"),
        ({"script": None, "module": "os"}, "module os is no file of"),
        ({"script": "data/big.py"}, "git ignores data/big.py"),
    ],
)
def test_a_target_that_is_no_part_of_the_copy_runs_from_the_live_tree(
    tree: Path, fields: dict[str, Any], reason: str
) -> None:
    (tree / "data/big.py").write_text("")
    if fields["script"] == "data/big.py":
        fields = {"script": str(tree / "data/big.py")}
    code = gather_code(source(tree, **fields))
    assert not code.snapshot
    assert reason in code.reason


@pytest.mark.parametrize("module", ["pkg", "pkg.sub", "untracked"])
def test_a_module_of_the_workdir_is_copied(tree: Path, module: str) -> None:
    (tree / "pkg/__main__.py").write_text("")
    (tree / "pkg/sub.py").write_text("")
    assert gather_code(source(tree, script=None, module=module)).snapshot


def test_a_file_that_cannot_be_read_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuses(path: Path) -> bytes:
        if path.name == "untracked.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    code = gather_code(source(tree))
    assert not code.snapshot
    assert "untracked.py cannot be read: Permission denied" in code.reason


def test_names_that_are_no_text_are_copied_too(tree: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tree / name).write_text("")
    code = gather_code(source(tree))
    assert name in code.files
    assert len(code.sha256) == 64


def facts(**fields: Any) -> CodeFacts:
    return CodeFacts(**{"root": "/r", "snapshot": True, **fields})


def test_changes_are_what_was_added_removed_and_modified() -> None:
    old, new = facts(files={"a": "1", "b": "1", "c": "1"}), facts(files={"a": "1", "b": "2", "d": "1"})
    changes = code_changes(old, new)
    assert changes == CodeChanges(added=("d",), removed=("c",), modified=("b",))
    assert changes.lines() == ["modified b", "added d", "removed c"]
    assert changes.lines(1) == ["modified b", "and 2 more"]
    assert not code_changes(old, old)
    assert old.sha256 != new.sha256


def test_what_one_of_them_left_out_is_no_change() -> None:
    """A file that held a secret then, when its variable was set, does not count as new now."""
    assert not code_changes(facts(files={"a": "1"}, skipped={"k": "secret"}), facts(files={"a": "1", "k": "2"}))


def test_the_code_of_the_built_in_job_is_what_computes() -> None:
    code = package_code()
    assert not code.snapshot
    assert "jobs/train.py" in code.files
    assert not [path for path in code.files if path.startswith("launcher/")]
