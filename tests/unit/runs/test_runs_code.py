"""The code in a run directory: the copy, what it records, and which code a resume or a rerun takes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs_values as values

from launcher.errors import Refused
from launcher.planning.code import CodeFacts, CodeSource
from launcher.planning.codefacts import gather_code
from launcher.planning.codeplan import with_code
from launcher.planning.plan import WorkerPlan
from launcher.runs.code import choose_code, code_of_rerun, copy_changes, read_code, store_code
from launcher.runs.create import create, resolved_recipe, update_plan
from launcher.runs.rundir import RunDir


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a script."""
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("import pkg\n")
    (root / "pkg/__init__.py").write_text("x = 1\n")
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / ".gitignore").write_text("data\n")
    (root / "data").mkdir()
    subprocess.run(["git", "-C", str(root), "init", "-q"], check=True)
    return root


def source(root: Path) -> CodeSource:
    return CodeSource(root=str(root), script=str(root / "train.py"), module=None, runs_dir=str(root / "runs"))


@pytest.fixture
def launched(tree: Path, runs_dir: Path) -> Callable[[], RunDir]:
    """Make a run of the script, as it is now."""

    def make() -> RunDir:
        facts = values.facts(cwd=str(tree), code=gather_code(source(tree)))
        worker = WorkerPlan(
            kind="script",
            module=None,
            script=str(tree / "train.py"),
            argv=(),
            cwd=str(tree),
            preload=None,
            python="python",
        )
        plan = with_code(values.plan(runs_dir, worker=worker), facts.code)
        return create(plan, recipe_text=None, resolved=resolved_recipe(plan), command=["launch"], facts=facts)

    return make


def test_the_copy_has_the_files_with_their_modes_and_links_to_what_is_not_copied(
    tree: Path, launched: Callable[[], RunDir]
) -> None:
    run = launched()
    assert (run.code / "pkg/__init__.py").read_text() == "x = 1\n"
    assert os.access(run.code / "tool.sh", os.X_OK)
    assert str((run.code / "data").readlink()) == str(tree / "data")
    assert read_code(run) == gather_code(source(tree))
    assert not copy_changes(run, gather_code(source(tree)))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_run_directory_with_code_is_its_owners_alone(launched: Callable[[], RunDir], umask: int) -> None:
    before = os.umask(umask)
    try:
        assert launched().path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_links_lead_to_the_copy_of_what_they_meant_or_to_the_thing_itself(
    tree: Path, launched: Callable[[], RunDir]
) -> None:
    (tree / "inside.py").symlink_to("pkg/__init__.py")
    (tree / "folder").symlink_to("pkg")
    (tree / "outside").symlink_to("../elsewhere")
    (tree / "whole").symlink_to("/etc/hostname")
    run = launched()
    assert str((run.code / "inside.py").readlink()) == "pkg/__init__.py"
    assert (run.code / "folder/__init__.py").read_text() == "x = 1\n"
    assert os.path.normpath(str((run.code / "outside").readlink())) == str(tree.parent / "elsewhere")
    assert str((run.code / "whole").readlink()) == "/etc/hostname"
    code = read_code(run)
    assert code is not None
    assert not copy_changes(run, code)


def test_what_changes_while_it_is_copied_is_recorded_as_it_was_copied(tree: Path, runs_dir: Path) -> None:
    code = gather_code(source(tree))
    (tree / "train.py").write_text("import pkg  # edited\n")
    (tree / "pkg/__init__.py").unlink()
    run = RunDir(runs_dir / "x")
    run.path.mkdir()
    stored = store_code(run, code)
    assert "pkg/__init__.py" not in stored.files
    assert stored.sha256 == gather_code(source(tree)).sha256
    assert not copy_changes(run, stored)


def test_names_that_are_no_text_survive_the_record(tree: Path, launched: Callable[[], RunDir]) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tree / name).write_text("")
    code = read_code(launched())
    assert code is not None
    assert name in code.files


def test_the_script_of_a_plan_lies_in_the_copy_and_the_record_names_the_live_one(
    tree: Path, launched: Callable[[], RunDir], runs_dir: Path
) -> None:
    run = launched()
    worker = WorkerPlan(
        kind="script", module=None, script=str(tree / "train.py"), argv=(), cwd=str(tree), preload=None, python="p"
    )
    plan = with_code(values.plan(runs_dir, worker=worker), gather_code(source(tree)))
    assert plan.worker.script == str(run.code / "train.py")
    assert plan.worker.cwd == str(tree)
    assert plan.live_script == str(tree / "train.py")
    assert f"script: {tree}/train.py" in run.resolved.read_text()


def test_code_that_is_as_it_was_goes_on(tree: Path, launched: Callable[[], RunDir]) -> None:
    chosen = choose_code(launched(), source(tree), None)
    assert (chosen.word, chosen.is_new) == ("unchanged", False)


def test_changed_code_is_refused_with_what_changed_unless_it_is_said_which(
    tree: Path, launched: Callable[[], RunDir]
) -> None:
    run = launched()
    (tree / "pkg/__init__.py").write_text("x = 2\n")
    (tree / "new.py").write_text("")
    (tree / "tool.sh").unlink()
    with pytest.raises(Refused, match=r"modified pkg/__init__.py, added new.py, removed tool.sh") as caught:
        choose_code(run, source(tree), None)
    assert "--code same" in caught.value.problems[0].hint
    same, current = (choose_code(run, source(tree), word) for word in ("same", "current"))
    assert (same.word, same.is_new, same.code) == ("same", False, read_code(run))
    assert (current.word, current.is_new, current.code) == ("current", True, gather_code(source(tree)))


def test_a_copy_that_was_edited_is_not_the_code_of_the_run(tree: Path, launched: Callable[[], RunDir]) -> None:
    run = launched()
    (run.code / "train.py").write_text("edited")
    for word in (None, "same"):
        with pytest.raises(Refused, match=r"the copy of its code, .*, was changed: modified train.py"):
            choose_code(run, source(tree), word)
    assert choose_code(run, source(tree), "current").is_new


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{}"), lambda path: path.write_text("[")])
def test_a_record_that_is_gone_is_no_licence_to_run_other_code(
    tree: Path, launched: Callable[[], RunDir], spoil: Callable[[Path], object]
) -> None:
    run = launched()
    spoil(run.code_record)
    for word in (None, "same"):
        with pytest.raises(Refused, match=r"not known: its `code\.json` is missing or damaged"):
            choose_code(run, source(tree), word)
    assert choose_code(run, source(tree), "current").is_new
    assert "maybe not that of" in code_of_rerun(run, source(tree))[2][0]


def test_a_live_tree_that_cannot_be_compared_is_refused(tree: Path, launched: Callable[[], RunDir]) -> None:
    run = launched()
    (tree / ".git").rename(tree / "not-git")
    with pytest.raises(Refused, match="out of reach of a comparison: it is no git repository"):
        choose_code(run, source(tree), None)


def test_without_a_copy_the_same_code_is_there_only_while_it_has_not_changed(
    tree: Path, launched: Callable[[], RunDir]
) -> None:
    (tree / ".git").rename(tree / "not-git")
    run = launched()
    assert not run.code.exists()
    assert choose_code(run, source(tree), "same").word == "unchanged"
    (tree / "train.py").write_text("edited")
    with pytest.raises(Refused, match=r"changed since: modified train.py\n"):
        choose_code(run, source(tree), None)
    with pytest.raises(Refused, match="no copy to go on with"):
        choose_code(run, source(tree), "same")
    assert not choose_code(run, source(tree), "current").code.snapshot


def test_the_built_in_job_goes_on_with_the_same_installation(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = CodeFacts(root="/site", snapshot=False, files={"jobs/train.py": "1"})
    run = values.create(runs_dir, facts=values.facts(cwd=str(runs_dir), code=code))
    monkeypatch.setattr("launcher.runs.code.package_code", lambda: code)
    assert choose_code(run, None, None).word == "unchanged"
    other = CodeFacts(root="/site", snapshot=False, files={"jobs/train.py": "2"})
    monkeypatch.setattr("launcher.runs.code.package_code", lambda: other)
    with pytest.raises(Refused, match=r"modified jobs/train.py"):
        choose_code(run, None, None)
    assert choose_code(run, None, "current").code == other


def test_a_new_copy_keeps_the_old_one(tree: Path, launched: Callable[[], RunDir]) -> None:
    run = launched()
    (tree / "train.py").write_text("second\n")
    plan = values.plan(run.path.parent)
    assert update_plan(run, plan, resolved={"name": "x"}, code=gather_code(source(tree))) == "code-1"
    assert (run.path / "code-1/train.py").read_text() == "import pkg\n"
    assert (run.code / "train.py").read_text() == "second\n"
    assert (run.path / "code-1.json").exists()
    assert update_plan(run, plan, resolved={"name": "x"}) is None
    assert (run.code / "train.py").exists()


def test_a_disk_that_fills_up_during_a_resume_leaves_everything_as_it_was(
    tree: Path, launched: Callable[[], RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launcher.runs.create.dump_yaml", full)
    with pytest.raises(Refused, match="No space left"):
        update_plan(run, values.plan(run.path.parent), resolved={}, code=gather_code(source(tree)))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_rerun_takes_the_copy_and_else_says_what_changed(tree: Path, launched: Callable[[], RunDir]) -> None:
    run = launched()
    (tree / "train.py").write_text("edited\n")
    code, origin, notes = code_of_rerun(run, source(tree))
    assert (code, origin) == (read_code(run), run.code)
    again = RunDir(run.path.parent / "again")
    again.path.mkdir()
    store_code(again, code, origin=origin)
    assert (again.code / "train.py").read_text() == "import pkg\n"
    (run.code / "train.py").write_text("spoiled")
    code, origin, notes = code_of_rerun(run, source(tree))
    assert (code.sha256, origin) == (gather_code(source(tree)).sha256, None)
    assert "its copy was changed: modified train.py" in notes[0]


def test_a_rerun_from_a_live_tree_says_what_changed(tree: Path, launched: Callable[[], RunDir]) -> None:
    (tree / ".git").rename(tree / "not-git")
    run = launched()
    assert code_of_rerun(run, source(tree))[2] == ()
    (tree / "train.py").write_text("edited")
    (tree / "not-git").rename(tree / ".git")
    code, origin, notes = code_of_rerun(run, source(tree))
    assert code.snapshot
    assert origin is None
    assert "changed since" in notes[0]
    assert "modified train.py" in notes[0]
