"""Run directories: what is in them, and what is left when one cannot be made."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import runs_values as values

from launcher.errors import Refused
from launcher.runs.create import create, installed_packages, new_run_id, resolved_recipe, update_plan
from launcher.runs.events import read_events
from launcher.runs.find import all_runs

NOW = datetime(2026, 11, 30, 2, 14)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("mnist-ddp", "mnist-ddp-1130-0214-"), ("A B/é", "a-b-1130-0214-"), ("1e10", "1e10-1130-0214-")],
)
def test_a_run_id_is_name_time_and_four_characters_of_a_safe_alphabet(name: str, prefix: str) -> None:
    run_id = new_run_id(name, now=NOW, random=random.Random(1))
    assert run_id.startswith(prefix)
    assert len(run_id) == len(prefix) + 4
    assert not set(run_id[-4:]) & set("ilo01")


def test_run_ids_of_one_minute_differ() -> None:
    source = random.Random(0)
    assert len({new_run_id("a", now=NOW, random=source) for _ in range(500)}) == 500


def test_a_new_run_has_its_record_and_a_secret_that_only_the_user_reads(runs_dir: Path) -> None:
    plan, facts = values.plan(runs_dir), values.facts(cwd=str(runs_dir))
    run = create(plan, recipe_text="name: x\n", resolved=resolved_recipe(plan), command=["launch", "a b"], facts=facts)
    assert run.path == runs_dir / plan.run_id
    assert run.plan.read_text() == plan.to_json()
    assert run.recipe.read_text() == "name: x\n"
    assert "workdir" in run.resolved.read_text()
    assert run.token.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(run.token.read_text())) == 32
    launch = json.loads(run.launch.read_text())
    assert launch["command"] == ["launch", "a b"]
    assert launch["packages"]["click"]
    assert [event["event"] for event in read_events(run.path)] == ["created"]
    assert [pointer.run for pointer in all_runs()] == [run]
    token = run.token.read_text()
    others = [path for path in run.path.rglob("*") if path.is_file() and path != run.token]
    assert not [path for path in others if token in path.read_text()]


def test_a_second_run_of_the_same_id_is_refused_and_the_first_stays_whole(runs_dir: Path) -> None:
    first = values.create(runs_dir)
    before = first.plan.read_text()
    with pytest.raises(Refused, match="cannot be made: File exists"):
        values.create(runs_dir)
    assert first.plan.read_text() == before
    assert len(all_runs()) == 1


def test_a_place_that_cannot_be_written_is_refused_with_another_way(runs_dir: Path) -> None:
    (runs_dir / "file").write_text("")
    with pytest.raises(Refused, match="--runs-dir") as caught:
        values.create(runs_dir / "file")
    assert caught.value.exit_code == 3
    assert all_runs() == []


def test_a_state_folder_that_cannot_be_written_is_refused_before_anything_exists(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs_dir / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(runs_dir / "file"))
    with pytest.raises(Refused, match="XDG_STATE_HOME"):
        values.create(runs_dir)
    assert [path.name for path in runs_dir.iterdir()] == ["file"]


def test_the_changes_of_a_dirty_tree_are_kept(runs_dir: Path) -> None:
    tree = runs_dir / "tree"
    tree.mkdir()
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tree / "train.py").write_text("lr = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (tree / "train.py").write_text("lr = 2\n")
    run = values.create(runs_dir, facts=values.facts(cwd=str(tree), git={"sha": "abc", "dirty": True}))
    kept = json.loads(run.launch.read_text())["git"]
    assert kept["sha"] == "abc"
    assert "+lr = 2" in kept["diff"]
    assert kept["diff_truncated"] is False


def test_a_diff_that_git_refuses_is_said_to_be_missing(runs_dir: Path) -> None:
    run = values.create(runs_dir, facts=values.facts(cwd=str(runs_dir), git={"sha": "abc", "dirty": True}))
    kept = json.loads(run.launch.read_text())["git"]
    assert kept["diff"] is None
    assert "not a git repository" in kept["diff_missing"].lower()


def test_packages_are_read_from_folder_names(tmp_path: Path) -> None:
    for name in ("Foo_Bar-1.2.dist-info", "torch-2.13.0+cpu.dist-info", "noise"):
        (tmp_path / name).mkdir()
    assert installed_packages([str(tmp_path), str(tmp_path / "absent")]) == {"foo-bar": "1.2", "torch": "2.13.0+cpu"}


def test_a_new_plan_keeps_the_old_one_and_what_came_of_it(runs_dir: Path) -> None:
    run = values.create(runs_dir)
    old = run.plan.read_text()
    for number in (1, 2):
        run.result.write_text(f"{{}}{number}")
        run.stop_file.touch()
        plan = values.plan(runs_dir, overrides=(f"train.seed={number}",))
        update_plan(run, plan, resolved={"name": "x"})
        assert run.plan.read_text() == plan.to_json()
        assert not run.result.exists()
        assert not run.stop_file.exists()
        assert (run.path / f"result-{number}.json").read_text() == f"{{}}{number}"
    assert (run.path / "plan-1.json").read_text() == old
    assert "train.seed=1" in (run.path / "plan-2.json").read_text()


def test_a_script_can_save_in_the_folder_it_is_given(runs_dir: Path) -> None:
    """LAUNCH_CHECKPOINT_DIR, `{checkpoint_dir}`: a script that knows torch.save alone does not make it."""
    assert values.create(runs_dir).checkpoints.is_dir()


def test_a_disk_that_fills_up_leaves_nothing_behind(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("launcher.runs.create.write_pointer", full)
    with pytest.raises(Refused, match="cannot be written: No space left on device"):
        values.create(runs_dir)
    assert list(runs_dir.iterdir()) == []
