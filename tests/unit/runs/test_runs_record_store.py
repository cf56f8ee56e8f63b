"""The record of a run at a URL: what is copied, what never is, and by whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.record_store import STOP, Copier, RecordStore, is_of_record, stamps


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(f"file://{tmp_path}/bucket/r0/record")


def test_what_a_node_writes_arrives_where_it_was_launched_and_nothing_else(tmp_path: Path, store: RecordStore) -> None:
    node, home = tmp_path / "node", tmp_path / "home"
    write(node, token="secret", plan_dot_json="{}", code__train_dot_py="x", checkpoints__step="y")
    copier = Copier(store, node, found=stamps(node))
    write(
        node, events__head_dot_jsonl="a\n", metrics_dot_jsonl="b\n", result_dot_json="{}", logs__console_dot_log="c\n"
    )
    assert len(copier.copy()) == 4
    assert len(store.fetch(home, old_logs=True)) == 4
    assert {path.name for path in home.rglob("*") if path.is_file()} == {
        "head.jsonl",
        "metrics.jsonl",
        "result.json",
        "console.log",
    }
    assert copier.copy() == []
    write(node, metrics_dot_jsonl="b\nc\n")
    assert copier.copy() == ["metrics.jsonl"]
    assert "metrics.jsonl" in store.fetch(home, old_logs=True)
    assert (home / "metrics.jsonl").read_text() == "b\nc\n"


def test_each_file_is_copied_by_the_node_that_writes_it(tmp_path: Path, store: RecordStore) -> None:
    """What a node has found there is not its own, unless it writes on."""
    node = write(tmp_path / "node", **{"events__node-0_dot_jsonl": "a\n", "events__node-1_dot_jsonl": "b\n"})
    copier = Copier(store, node, found=stamps(node))
    assert copier.copy(everything=True) == []
    write(node, **{"events__node-1_dot_jsonl": "b\nc\n"})
    assert copier.copy(everything=True) == ["events/node-1.jsonl"]


def test_long_files_are_copied_seldom_and_at_the_end(tmp_path: Path, store: RecordStore) -> None:
    now_s = [0.0]
    node = tmp_path / "node"
    copier = Copier(store, node, found={}, clock=lambda: now_s[0])
    log = node / "logs" / "attempt-1" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * 20_000_000)
    assert len(copier.copy()) == 1
    log.write_bytes(b"x" * 20_000_001)
    now_s[0] = 5.0
    assert copier.copy() == []
    now_s[0] = 11.0
    assert len(copier.copy()) == 1
    log.write_bytes(b"x" * 20_000_002)
    assert len(copier.copy(everything=True)) == 1


def test_old_logs_stay_where_they_are_when_other_machines_take_over(tmp_path: Path, store: RecordStore) -> None:
    node, next_node = tmp_path / "node", tmp_path / "next"
    copier = Copier(store, node, found=stamps(node))
    write(node, **{"logs__attempt-1__rank-0_dot_log": "a", "logs__console_dot_log": "b"})
    copier.copy()
    assert store.fetch(next_node, old_logs=False) == ["logs/console.log"]


def test_a_request_to_stop_is_seen_and_taken_back(tmp_path: Path, store: RecordStore) -> None:
    assert store.stop_asked() is None
    store.ask_to_stop(15)
    assert store.stop_asked() == 15
    assert store.names() == {}, f"{STOP} is no part of the record"
    store.withdraw()
    assert store.stop_asked() is None


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("metrics.jsonl", True),
        ("result-3.json", True),
        ("events/head.jsonl", True),
        ("logs/attempt-1/node-0/rank-0.log", True),
        ("token", False),
        ("plan.json", False),
        ("agent/start.py", False),
        ("code/train.py", False),
        ("events/../token", False),
        ("events//x", False),
        ("../events/x", False),
        ("/events/x", False),
    ],
)
def test_a_bucket_cannot_write_outside_of_the_record(name: str, belongs: bool) -> None:
    assert is_of_record(name) is belongs


def test_links_and_unfinished_files_are_no_record(tmp_path: Path) -> None:
    node = write(tmp_path / "node", events__a_dot_jsonl="a", events__b_dot_tmp="b")
    (node / "events" / "link.jsonl").symlink_to("/etc/passwd")
    assert list(stamps(node)) == ["events/a.jsonl"]
