"""What a worker said last."""

from __future__ import annotations

from launcher.agent.words import LastWords


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
