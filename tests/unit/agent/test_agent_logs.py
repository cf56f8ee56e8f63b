"""F076: whole lines, nothing lost, nothing without bound."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from launcher.agent.logs import LineFile, Stream, prefixed


class Output:
    """A worker's stdout: the write end, and what the stream made of it."""

    def __init__(self) -> None:
        read_end, self.fd = os.pipe()
        self.calls: list[bytes] = []
        self.stream = Stream(read_end, self.calls.append)

    def write(self, data: bytes) -> None:
        os.write(self.fd, data)
        self.stream.read()

    @property
    def text(self) -> bytes:
        return b"".join(self.calls)


@pytest.fixture
def output() -> Output:
    return Output()


class TestStream:
    def test_only_whole_lines_are_handed_on(self, output: Output) -> None:
        output.write(b"one\ntw")
        assert output.calls == [b"one\n"]
        output.write(b"o\nthree\n")
        assert output.text == b"one\ntwo\nthree\n"
        assert all(call.endswith(b"\n") for call in output.calls)

    def test_a_last_line_without_an_end_gets_one(self, output: Output) -> None:
        output.write(b"almost done")
        os.close(output.fd)
        assert not output.stream.read()
        output.stream.drain_and_close()
        assert output.text == b"almost done\n"

    def test_an_empty_stream_hands_on_nothing(self, output: Output) -> None:
        os.close(output.fd)
        assert not output.stream.read()
        output.stream.drain_and_close()
        assert output.calls == []

    def test_nothing_to_read_is_not_the_end(self, output: Output) -> None:
        assert output.stream.read()

    def test_a_secret_that_comes_in_two_writes_or_at_the_end_of_a_piece_is_not_handed_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F060"""
        monkeypatch.setenv("HF_TOKEN", "canary-0815-cafe")
        output = Output()
        output.write(b"the key is canary-08")
        output.write(b"15-cafe\n")
        assert output.text == b"the key is ***HF_TOKEN***\n"
        endless = (b"x" * 37 + b"canary-0815-cafe") * 60_000
        for begin in range(0, len(endless), 30_011):
            output.write(endless[begin : begin + 30_011])
        os.close(output.fd)
        output.stream.drain_and_close()
        assert output.text.count(b"\n") > 3, "it came in pieces"
        shown = output.text.replace(b"\n", b"")
        assert b"cana" not in shown
        assert b"cafe" not in shown
        assert shown.count(b"***HF_TOKEN***") == 60_001

    def test_a_line_that_never_ends_is_handed_on_in_pieces(self, output: Output) -> None:
        for _ in range(40):
            output.write(b"." * 60_000)
        assert len(output.text) > 1 << 20
        assert output.text.endswith(b"\n")
        os.close(output.fd)
        output.stream.drain_and_close()
        assert output.text.replace(b"\n", b"") == b"." * (40 * 60_000)

    def test_what_a_killed_worker_left_in_the_pipe_is_kept(self, output: Output) -> None:
        os.write(output.fd, b"x" * 50_000 + b"\nlast words")
        output.stream.drain_and_close()  # a child of the worker may still hold the other end
        assert output.text == b"x" * 50_000 + b"\nlast words\n"
        os.close(output.fd)

    def test_a_child_that_writes_for_ever_does_not_hold_the_agent(self) -> None:
        read_end, write_end = os.pipe()
        lines: list[bytes] = []

        def take(data: bytes) -> None:
            lines.append(data)
            assert len(lines) < 100, "it would never have come to an end"
            os.write(write_end, b"." * 9_999 + b"\n")  # as fast as it is read

        stream = Stream(read_end, take)
        os.write(write_end, b"once\n")
        stream.drain_and_close()
        assert b"".join(lines).startswith(b"once\n")
        os.close(write_end)


class TestLineFile:
    def test_two_writers_never_tear_each_others_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "console.log"

        def write(letter: bytes) -> None:
            file = LineFile(path)
            for _ in range(100):
                file.write(letter * 10_000 + b"\n")
            file.close()

        threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = path.read_bytes().splitlines()
        assert sorted(lines) == [b"a" * 10_000] * 100 + [b"b" * 10_000] * 100

    def test_a_file_is_gone_on_with(self, tmp_path: Path) -> None:
        for line in (b"one\n", b"two\n"):
            file = LineFile(tmp_path / "log")
            file.write(line)
            file.close()
        assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"

    def test_is_capped_and_says_so_once(self, tmp_path: Path) -> None:
        file = LineFile(tmp_path / "log", max_bytes=20)
        for _ in range(10):
            file.write(b"0123456789\n")
        file.close()
        text = (tmp_path / "log").read_text()
        assert text.count("0123456789\n") == 2
        assert text.endswith("launch: this log has reached its limit; what follows is dropped\n")


def test_every_line_is_prefixed_with_node_and_rank() -> None:
    assert prefixed(b"one\n\nthree\n", "1:3") == b"1:3 one\n1:3 \n1:3 three\n"
