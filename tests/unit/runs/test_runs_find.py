"""Finding runs from anywhere: ids, prefixes, last four characters, paths, `last`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import runs_values as values

from launcher.errors import RecipeError
from launcher.runs.find import all_runs, find_run, state_folder, state_root

IDS = ("mnist-1130-0214-aaaa", "mnist-1130-0214-bbbb", "lora-8b-1130-0300-cccc")


@pytest.fixture
def three(runs_dir: Path) -> Path:
    for run_id in IDS:
        values.create(runs_dir, run_id=run_id)
    return runs_dir


def test_runs_are_listed_newest_first(three: Path) -> None:
    assert [pointer.run_id for pointer in all_runs()] == list(reversed(IDS))
    assert all(abs(pointer.created_s - time.time()) < 60 for pointer in all_runs())


@pytest.mark.parametrize("text", ["mnist-1130-0214-aaaa", "mnist-1130-0214-a", "aaaa"])
def test_a_run_is_found_by_id_prefix_or_last_four(three: Path, text: str) -> None:
    assert find_run(text).path == three / "mnist-1130-0214-aaaa"


def test_last_is_the_newest_that_is_still_there(three: Path) -> None:
    assert find_run("last").run_id == IDS[2]
    shutil.rmtree(three / IDS[2])
    assert find_run("last").run_id == IDS[1]


def test_a_path_needs_no_pointer(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = (three / IDS[0]).rename(three / "elsewhere 'x'")
    assert find_run(str(moved)).path == moved
    monkeypatch.chdir(three)
    assert find_run("elsewhere 'x'").path == moved
    monkeypatch.chdir(moved)
    assert find_run(".").path == moved


def test_an_id_that_begins_others_is_itself(three: Path) -> None:
    values.create(three, run_id="mnist-1130-0214-aaaa2")
    assert find_run("mnist-1130-0214-aaaa").run_id == "mnist-1130-0214-aaaa"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mnist", "2 runs match.*one of: mnist-1130-0214-bbbb, mnist-1130-0214-aaaa"),
        ("nosuch", "no run has this id.*the newest: lora-8b-1130-0300-cccc"),
        ("cc", "no run has this id"),
        ("", "no run has this id"),
        ("./nosuch", "no run directory here"),
    ],
)
def test_what_is_not_one_run_exits_2_with_candidates(three: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){said}") as caught:
        find_run(text)
    assert caught.value.exit_code == 2


def test_a_folder_that_was_moved_is_gone_and_its_old_place_is_named(three: Path) -> None:
    shutil.rmtree(three / IDS[0])
    with pytest.raises(RecipeError, match="is gone from") as caught:
        find_run("aaaa")
    assert str(three / IDS[0]) in str(caught.value)
    assert [pointer.gone for pointer in all_runs()] == [False, False, True]


def test_without_runs_last_says_so(runs_dir: Path) -> None:
    with pytest.raises(RecipeError, match="there is no run yet"):
        find_run("last")


def test_a_relative_state_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_root() == tmp_path / ".local" / "state" / "launcher"


def test_ten_thousand_runs_are_sorted_and_searched_without_opening_one(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of files that do not exist: opening one would fail.
    names = [f"20261130T{number:06d}.000000_run-{number:05d}.json" for number in range(10_000)]
    state_folder()
    monkeypatch.setattr("launcher.runs.find.os.listdir", lambda _: names)
    pointers = all_runs()
    with pytest.raises(RecipeError, match="1000 runs match"):
        find_run("run-01")
    assert [pointer.run_id for pointer in pointers[:2]] == ["run-09999", "run-09998"]
