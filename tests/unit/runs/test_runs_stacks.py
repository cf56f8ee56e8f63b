"""Stacks of ranks: what is read, and what is put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.runs.spy import not_of_run
from launcher.runs.stacks import Frame, RankStack, Thread, detail, parse_dump, parse_pyspy, place_of, summary

TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
DUMP = """epoch 1 loss 0.3
Thread 0x00007f57a013d6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f57a0c93b80 [python] (most recent call first):
a line of another thread
  File "/home/a b/t.py", line 5 in spin
  File "/home/a b/t.py", line ??? in <module>
"""


def frame(function: str, file: str, line: int = 1) -> Frame:
    return Frame(function=function, file=file, line=line)


def stack(rank: int, *frames: Frame, running: bool | None = False, **fields: str) -> RankStack:
    main = Thread(name="MainThread", main=True, running=running, frames=frames)
    return RankStack(rank=rank, node=0, pid=100 + rank, threads=(main,), source="py-spy", **fields)


def test_a_dump_is_found_among_what_is_printed_and_its_last_thread_is_the_main_one() -> None:
    other, main = parse_dump(DUMP)
    assert (other.main, main.main) == (False, True)
    assert main.frames == (frame("spin", "/home/a b/t.py", 5), frame("<module>", "/home/a b/t.py", 0))
    assert parse_dump("nothing here\n") == ()


def test_the_main_thread_of_py_spy_is_the_one_whose_number_is_the_pid() -> None:
    frames = [{"name": "f", "filename": "/t.py", "line": 3}]
    threads = [
        {"thread_name": "Thread-1", "os_thread_id": 8, "active": False, "frames": []},
        {"thread_name": None, "os_thread_id": 7, "active": True, "frames": frames},
    ]
    other, main = parse_pyspy(json.dumps(threads), 7)
    assert (other.main, main.main, main.running) == (False, True, True)
    assert main.frames == (frame("f", "/t.py", 3),)


@pytest.mark.parametrize("text", ["", "Error: x", "[1]", '[{"pid": 3}]', "{}x", "7"])
def test_what_is_no_dump_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_pyspy(text, 7)


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        (TORCH, True),
        ("/usr/lib/python3.11/threading.py", True),
        ("<frozen runpy>", True),
        ("/v/lib/python3.11/site-packages/launcher/agent/wrapper.py", True),
        ("/runs/x/agent/launcher/agent/wrapper.py", True),
        ("/v/lib/python3.11/site-packages/jobs/trainer.py", False),
        ("/home/me/launcher/train.py", False),
        ("/home/me/python3.11/train.py", False),
    ],
)
def test_what_is_the_users_own(file: str, is_library: bool) -> None:
    assert frame("f", file).is_library is is_library


def test_ranks_at_one_place_stand_together_and_the_odd_one_out_is_seen() -> None:
    """F072."""
    waits = [frame("all_reduce", TORCH, 3252), frame("step", "/h/train.py", 41), frame("<module>", "/h/train.py", 90)]
    sleeps = [frame("fetch", "/h/data.py", 7), frame("<module>", "/h/train.py", 88)]
    lines = summary([stack(0, *waits), stack(1, *waits), stack(3, *sleeps, running=True), stack(2, *waits)])
    assert lines == [
        "ranks 0-2  all_reduce at /h/train.py:41 in step   (waiting)",
        "rank 3     /h/data.py:7 in fetch   (running)",
    ]


def test_a_rank_that_cannot_be_seen_says_why() -> None:
    gone = RankStack(rank=1, node=1, pid=9, trouble="it runs on n1, this is n0")
    assert summary([stack(0, frame("f", "/t.py")), gone])[1] == "rank 1  it runs on n1, this is n0"
    assert detail(gone) == ["rank 1   node 1   pid 9   it runs on n1, this is n0"]


def test_all_of_it() -> None:
    whole = detail(stack(0, frame("f", "/t.py", 2), frame("<module>", "/t.py", 9)))
    assert whole == [
        "rank 0   node 0   pid 100   py-spy",
        "  MainThread, waiting",
        "    /t.py:2 in f",
        "    /t.py:9 in <module>",
    ]


def test_a_thread_in_nothing_but_libraries_is_at_its_innermost_call() -> None:
    thread = Thread(name="", main=True, running=None, frames=(frame("wait", TORCH, 5), frame("run", TORCH, 6)))
    assert place_of(thread) == f"{TORCH}:5 in wait"
    assert place_of(Thread(name="", main=True, running=None, frames=())) == "no Python code"


def test_a_number_that_is_another_process_by_now_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0LAUNCH_RUN_ID=x-2\0")
    assert not_of_run(7, "x-2", tmp_path) == ""
    assert not_of_run(7, "x", tmp_path) == "pid 7 is another process by now"
    assert not_of_run(8, "x", tmp_path) == "pid 8 has ended"
