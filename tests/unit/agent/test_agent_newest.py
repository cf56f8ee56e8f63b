"""Which checkpoint of a script's own is the newest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.agent.newest import find_newest


def _folder(path: Path, *, content: str = "x") -> Path:
    path.mkdir(parents=True)
    if content:
        (path / "state.json").write_text(content)
    return path


def test_the_highest_number_wins_and_not_the_alphabet(tmp_path: Path) -> None:
    for step in (500, 1000, 50):
        _folder(tmp_path / f"checkpoint-{step}")
    assert find_newest(str(tmp_path / "checkpoint-*")) == str(tmp_path / "checkpoint-1000")


def test_of_files_the_number_before_the_ending_counts(tmp_path: Path) -> None:
    for name in ("epoch=9-step=200.ckpt", "epoch=10-step=199.ckpt", "model-100.pt2"):
        (tmp_path / name).write_text("x")
    assert find_newest(str(tmp_path / "*")) == str(tmp_path / "epoch=9-step=200.ckpt")


def test_without_numbers_the_latest_change_wins(tmp_path: Path) -> None:
    for name, time_s in (("b.ckpt", 100), ("a.ckpt", 200)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (time_s, time_s))
    assert find_newest(str(tmp_path / "*.ckpt")) == str(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "name",
    ["checkpoint-900.tmp", "tmp-checkpoint-900", ".tmp-checkpoint-900", "checkpoint-900.partial", "checkpoint-900~"],
)
def test_what_is_still_being_written_does_not_count(tmp_path: Path, name: str) -> None:
    _folder(tmp_path / name)
    good = _folder(tmp_path / "checkpoint-500")
    assert find_newest(str(tmp_path / "*")) == str(good)


def test_links_to_nothing_and_what_is_empty_do_not_count(tmp_path: Path) -> None:
    good = _folder(tmp_path / "checkpoint-500")
    _folder(tmp_path / "checkpoint-600", content="")
    (tmp_path / "checkpoint-700").symlink_to(tmp_path / "gone")
    (tmp_path / "checkpoint-800").touch()
    (tmp_path / "checkpoint-100").symlink_to(good)
    assert find_newest(str(tmp_path / "checkpoint-*")) == str(good)
    assert find_newest(str(tmp_path / "other-*")) is None
