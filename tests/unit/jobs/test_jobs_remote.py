"""Checkpoints at a URL: complete or absent there, read back, and copied one at a time; on a folder, by fsspec."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_jobs_shelf import put

from jobs.folders import complete
from jobs.manifest import MANIFEST, STATE, verify
from jobs.shelf import Shelf
from jobs.store_disks import StoreError
from jobs.store_remote import Remote, RemoteError, Uploader, fetch_newest
from launcher.runs.events import EventWriter, read_events

LIMIT_S = 20.0


class Store:
    """A run's folder here, and its place there."""

    def __init__(self, folder: Path) -> None:
        self.here, self.run = folder / "checkpoints", folder
        self.shelf = Shelf(self.here, attempt=2, keep=2, best=None)
        self.remote = Remote(f"file://{folder}/bucket/", "run-a")
        self.there = folder / "bucket" / "run-a" / "checkpoints"

    def uploader(self, keep: int = 2) -> Uploader:
        return Uploader(self.remote, self.shelf, EventWriter(self.run, "uploader"), attempt=2, keep=keep)

    def told(self, name: str) -> list[int]:
        return [event["step"] for event in read_events(self.run) if event["event"] == name]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_what_is_uploaded_is_the_same_there_and_comes_back_as_it_was(store: Store) -> None:
    put(store.here, 3)
    assert store.remote.names() == []
    assert store.remote.upload(store.here / "step-3") == 2
    verify(store.there / "step-3")
    assert store.remote.names() == ["step-3"]
    other = Shelf(store.run / "other", attempt=1, keep=1, best=None)
    (said,) = fetch_newest(store.remote, other, newer_than=-1)
    assert said == f"step-3 was fetched from {store.remote.url}"
    verify(other.folder / "step-3")
    assert fetch_newest(store.remote, other, newer_than=3) == [], "it is here already"


def test_without_its_manifest_it_is_not_there(store: Store) -> None:
    """An upload that was cut off."""
    put(store.here, 3)
    store.remote.upload(store.here / "step-3")
    (store.there / "step-3" / MANIFEST).unlink()
    assert store.remote.names() == []
    assert fetch_newest(store.remote, store.shelf, newer_than=-1) == []
    store.remote.upload(store.here / "step-3")
    verify(store.there / "step-3")


def test_another_one_of_the_same_step_takes_its_place(store: Store) -> None:
    put(store.here, 3)
    store.remote.upload(store.here / "step-3")
    put(store.run / "again", 3, loss=0.5)
    store.remote.upload(store.run / "again" / "step-3")
    verify(store.there / "step-3")
    assert (store.there / "step-3" / MANIFEST).read_text() == (store.run / "again" / "step-3" / MANIFEST).read_text()


def test_what_reads_back_otherwise_is_never_complete(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(remote: Remote, path: Path, place: str) -> None:
        data = path.read_bytes()
        Path(place).write_bytes(data[:-1] + b"x" if path.name == STATE else data)

    put(store.here, 3)
    monkeypatch.setattr(Remote, "_put", spoil)
    with pytest.raises(RemoteError, match=r"reads back otherwise: state.json has the hash"):
        store.remote.upload(store.here / "step-3")
    assert store.remote.names() == []


def test_of_several_the_newest_good_one_is_fetched(store: Store) -> None:
    for step in (1, 2, 10):
        put(store.here, step)
        store.remote.upload(store.here / f"step-{step}")
    (store.there / "step-10" / STATE).write_text("xx")
    other = Shelf(store.run / "other", attempt=1, keep=1, best=None)
    broken, fetched = fetch_newest(store.remote, other, newer_than=1)
    assert "step-10 at file://" in broken
    assert "is broken: state.json has the hash" in broken
    assert fetched.startswith("step-2 was fetched")
    assert complete(other.folder) == ["step-2"]
    assert sorted(path.name for path in other.folder.iterdir()) == ["step-2"], "nothing half is left"


def test_keep_holds_there_too_and_the_best_one_is_there(store: Store) -> None:
    store.shelf = Shelf(store.here, attempt=2, keep=5, best="eval/loss min")
    uploader = store.uploader(keep=1)
    for step, loss in ((1, 0.9), (2, 0.1), (3, 0.5)):
        put(store.here, step, loss)
        if step != 2:  # overtaken, before its turn came
            uploader.offer(f"step-{step}")
            assert uploader.finish(LIMIT_S)
    assert store.remote.names() == ["step-2", "step-3"]
    assert store.told("uploaded") == [1, 3]


class Gate:
    """Holds an upload until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        inner: Callable[..., Any] = Remote.upload

        def upload(remote: Remote, folder: Path) -> int:
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            return int(inner(remote, folder))

        monkeypatch.setattr(Remote, "upload", upload)


def test_the_newest_of_those_that_wait_is_the_next_and_what_is_read_is_not_pruned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, uploader = Gate(monkeypatch), store.uploader()
    for step in (1, 2, 3, 4):
        put(store.here, step)
        uploader.offer(f"step-{step}")
        assert gate.reached.wait(LIMIT_S)
        store.shelf.prune()
    assert complete(store.here) == ["step-1", "step-3", "step-4"], "the first one is being read"
    assert not uploader.finish(0.01), "there was no time for it"
    gate.open.set()
    assert uploader.finish(LIMIT_S)
    assert store.told("uploaded") == [1, 4]
    store.shelf.prune()
    assert complete(store.here) == ["step-3", "step-4"]


def test_an_upload_that_fails_is_told_and_the_next_one_is_tried(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    (store.run / "bucket").touch()
    uploader = store.uploader()
    put(store.here, 1)
    uploader.offer("step-1")
    assert uploader.finish(LIMIT_S)
    assert store.told("upload_failed") == [1]
    assert "THE UPLOAD OF STEP 1 to file://" in capsys.readouterr().out
    (store.run / "bucket").unlink()
    put(store.here, 2)
    uploader.offer("step-2")
    assert uploader.finish(LIMIT_S)
    assert store.told("uploaded") == [2]


@pytest.mark.parametrize("url", ["nowhere://x", "dropbox://bucket"])
def test_what_cannot_be_used_at_all_is_known_at_once(url: str) -> None:
    with pytest.raises(StoreError, match=rf"checkpoint\.store: {url} cannot be used here: "):
        Remote(url, "run-a")
