"""What a worker said last."""

from __future__ import annotations

from launcher.agent.last_words import LastWords
from launcher.agent.wrapper import ENDED_BY


def words(*parts: tuple[bytes, bool]) -> LastWords:
    last = LastWords()
    for lines, is_stderr in parts:
        last.add(lines, is_stderr=is_stderr)
    return last


def test_the_last_ten_lines_of_stderr_with_the_line_of_the_log_where_they_begin() -> None:
    last = words((b"out 1\nout 2\n", False), *((f"err {i}\n".encode(), True) for i in range(12)))
    assert last.text.splitlines() == [f"err {i}" for i in range(2, 12)]
    assert last.line == 2 + 2 + 1


def test_a_traceback_is_where_the_log_is_opened() -> None:
    last = words(
        (b"out\n", False),
        (b"warning\nTraceback (most recent call last):\n  File 'x'\nValueError: boom\n", True),
        (b"out\n", False),
    )
    assert last.line == 3


def test_a_traceback_of_a_group_is_where_the_log_is_opened() -> None:
    group = b"warning\n  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two\n"
    assert words((group, True)).line == 2


def test_a_traceback_is_one_with_the_rank_that_torch_puts_before_each_line() -> None:
    for traceback in (b"Traceback (most", b"  + Exception Group Traceback (most"):
        text = b"warning\n[rank1]: " + traceback + b" recent call last):\n[rank1]: ValueError: boom\n"
        assert words((text, True)).line == 2


def test_an_error_that_needs_no_traceback_is_where_the_log_is_opened() -> None:
    text = f"warning\n{ENDED_BY}SaveError: step-20 could not be written\n".encode()
    assert words((b"out\n", False), (text, True)).line == 3


def test_a_progress_bar_is_shown_as_it_was_last_and_gives_no_orders_to_the_terminal() -> None:
    bars = b"".join(b"\r\x1b[32m%3d%%\x1b[0m |####|" % percent for percent in range(60)) + b"\n"
    assert words((bars, True), (b"\x1b]0;title\x07gone\r\n", True)).text == " 59% |####|\ngone"


def test_a_traceback_that_python_ignores_at_the_exit_is_not_the_one() -> None:
    last = words(
        (b"Traceback (most recent call last):\nValueError: boom\n", True),
        (b"Exception ignored in: <function x>\nTraceback (most recent call last):\nOSError: late\n", True),
    )
    assert last.line == 1


def test_of_one_that_wrote_on_stdout_only_the_last_line() -> None:
    last = words((b"a\nb\n", False))
    assert (last.line, last.text) == (2, "")


def test_of_one_that_said_nothing_there_is_nothing() -> None:
    assert (words().line, words().text) == (None, "")


def test_long_lines_are_cut_and_what_is_no_text_is_shown_as_such() -> None:
    last = words(*((bytes([65 + i]) * 5_000 + b"\n", True) for i in range(9)), (b"\xff end\n", True))
    assert len(last.text) <= 2_100
    assert last.text.splitlines()[-1] == "\N{REPLACEMENT CHARACTER} end"


def test_the_watchdog_of_nccl_is_heard_though_many_lines_follow() -> None:
    """F072: it aborts the process from C++, so there is no exception."""
    spoken = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600081 ms"
    frames = [(f"frame #{i}: c10d::x\n".encode(), True) for i in range(40)]
    last = words((f"[rank0]:[E1218 ProcessGroupNCCL.cpp:629] [Rank 0] {spoken}\n".encode(), True), *frames)
    assert last.timeout == spoken
    assert last.line == 1
    assert words((b"nothing\n", True)).timeout == ""


CRASH = """about to crash
Fatal Python error: Segmentation fault

Thread 0x00007fd3ec3c9b80 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007fd3ec3c9b81 [python] (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/ada/train.py", line 3 in step
  File "/home/ada/train.py", line 9 in <module>
  File "/opt/site-packages/launcher/agent/wrapper.py", line 40 in run_script

Thread 0x00007fd3ec3c9b82 (most recent call first):
  File "/home/ada/other.py", line 1 in poll

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_of_a_crash_the_place_is_kept_and_not_the_many_lines() -> None:
    last = words((b"out\n", False), (CRASH.encode(), True))
    assert last.text.splitlines() == ["about to crash", "Fatal Python error: Segmentation fault"]
    assert last.place == "/home/ada/train.py:3 in step"
    assert last.line == 2


def test_what_is_said_after_the_crash_of_a_child_is_heard_again() -> None:
    last = words((CRASH.encode(), True), (b"loader died\nno data left\n", True))
    assert last.text.splitlines()[-2:] == ["loader died", "no data left"]


def test_without_a_crash_there_is_no_place() -> None:
    assert words((b"x\n", True)).place == ""
    assert words((b"Fatal Python error: Aborted\n", True)).place == ""
