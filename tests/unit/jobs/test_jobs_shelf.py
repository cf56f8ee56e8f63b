"""The folder of checkpoints on one disk: copies, what a later attempt went on without, and what is in use."""

from __future__ import annotations

from pathlib import Path

from jobs.durable import write_hashed
from jobs.manifest import STATE, Manifest, seal
from jobs.shelf import Shelf, best_of
from jobs.storage import TENSORS
from jobs.store_copies import Copies, Copy, _left_behind, _version
from jobs.store_disks import Disks


def put(folder: Path, step: int, loss: float | None = None) -> None:
    place = folder / f"step-{step}"
    place.mkdir(parents=True)
    files = {name: write_hashed(place / name, f"{step}") for name in (TENSORS, STATE)}
    seal(place, Manifest(files=files, metrics=None if loss is None else {"eval/loss": loss}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_somebody_reads_is_not_pruned_until_it_is_read(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, attempt=1, keep=1, best=None)
    for step in (1, 2, 3):
        put(tmp_path, step)
    shelf.in_use = {"step-1"}
    shelf.prune()
    assert names(tmp_path) == ["step-1", "step-3"]
    shelf.in_use = ()
    shelf.prune()
    assert names(tmp_path) == ["step-3"]


def test_of_equally_good_ones_the_newest_is_the_best(tmp_path: Path) -> None:
    for step, loss in ((9, 0.5), (10, 0.5), (11, 0.7)):
        put(tmp_path, step, loss)
    assert Shelf(tmp_path, attempt=1, keep=1, best="eval/loss min").best() == "step-10"
    assert best_of({}) is None


def test_a_second_broken_one_of_a_name_takes_the_place_of_the_first(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, attempt=2, keep=1, best=None)
    for _ in range(2):
        put(tmp_path, 4)
        shelf.put_aside(["step-4"])
    assert names(tmp_path) == ["step-4.broken-2"]


def test_a_version_is_its_files_and_not_what_was_measured_later(tmp_path: Path) -> None:
    files = {name: write_hashed(tmp_path / name, name) for name in (TENSORS, STATE)}
    other = {**files, STATE: write_hashed(tmp_path / "other", "other")}
    assert _version(Manifest(files=files)) == _version(Manifest(files=files, metrics={"eval/loss": 1.0}))
    assert _version(Manifest(files=files)) != _version(Manifest(files=other))


def test_what_a_later_attempt_went_on_without_is_left_behind() -> None:
    old, before = Copy(name="step-30", version="a", attempt=1), Copy(name="step-10", version="b", attempt=1)
    newer = Copy(name="step-20", version="c", attempt=2)
    assert _left_behind([old, before, newer]) == [old]
    assert _left_behind([old, before]) == []
    assert _left_behind([old, Copy(name="step-20", version="", attempt=2, problem="is broken")]) == []


def test_a_disk_that_holds_nothing_is_cleared_and_never_one_on_which_the_new_one_is(tmp_path: Path) -> None:
    """Where the tokens were not seen in time, the folder of a holder may be taken for another one."""
    disks = Disks(of_rank=(0, 1), names=("node 0", "node 1"))
    shelf = Shelf(tmp_path, attempt=1, keep=2, best=None)
    copies = Copies(shelf, disks, rank=1, attempt=1, group=None, holders=1)
    for step in (2, 3):
        put(tmp_path, step)
    copies._tidy_after("step-3")
    assert names(tmp_path) == ["step-2", "step-3"]
    copies._tidy_after("step-4")
    assert names(tmp_path) == []
