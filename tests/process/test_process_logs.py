"""F076: what workers print is kept, whole, and labelled."""

from __future__ import annotations

import os
import re
import signal

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

SHOUTS = """
import os, sys, toy
letters = chr(ord("a") + toy.RANK) * 10_000
counted = os.open(toy.RUN / f"counted.{toy.RANK}", os.O_WRONLY | os.O_CREAT)
for number in range(100_000):
    print("out", toy.RANK, number, letters)
    print("err", toy.RANK, number, letters, file=sys.stderr)
    os.pwrite(counted, b"%9d" % (number + 1), 0)
    if number == 20:
        toy.mark("up")
"""
LINE = re.compile(r"(out|err) (\d) (\d+) ([a-d])\4{9999}")


@pytest.mark.parametrize("preload", [True, False])
def test_four_ranks_shout_and_are_killed_and_nothing_is_torn_or_lost(
    launch: Launch, recipe: Recipe, preload: bool
) -> None:
    run = launch(recipe(SHOUTS, nodes=2, preload=preload))
    for pid in run.wait_for_marks("up", ranks=4):
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 137, run.text
    for rank in range(4):
        flushed = int((run.run.path / f"counted.{rank}").read_text())
        numbers: dict[str, list[int]] = {"out": [], "err": []}
        torn = []
        for line in run.log(rank, node=rank // 2).splitlines():
            if found := LINE.fullmatch(line):
                assert found[2] == str(rank)
                numbers[found[1]].append(int(found[3]))
            else:
                torn.append(line)
        assert len(torn) <= 2, "only the last line of each stream may be cut, by the kill"
        for stream in numbers.values():
            assert stream == list(range(len(stream))), "lines are missing or out of order"
            assert len(stream) >= flushed, "a line that was flushed is not in the file"
    console = [line for line in run.run.console.read_text().splitlines() if not line.startswith("launch | ")]
    labels = {0: "0:0", 1: "0:1", 2: "1:2", 3: "1:3"}
    seen, torn = set(), []
    for line in console:
        label, _, text = line.partition(" ")
        assert label in labels.values(), line[:80]
        if found := LINE.fullmatch(text):
            assert label == labels[int(found[2])]
            seen.add((found[1], int(found[2])))
        else:
            torn.append(line)
    assert len(torn) <= 5, "only the last line of each stream may be cut, by the kill"
    assert seen == {("out", 0), ("err", 0), ("err", 1), ("err", 2), ("err", 3)}, "rank 0, and the errors of all"


def test_each_attempt_has_its_own_files_and_an_unfinished_last_line_is_kept(launch: Launch, recipe: Recipe) -> None:
    source = (
        "import sys, toy\nsys.stdout.write(f'attempt {toy.ATTEMPT}, no line end')\ntoy.mark('wrote')\n"
        "if toy.ATTEMPT == 1 and toy.RANK == 1:\n    toy.wait_for('wrote.0.1')\n    raise SystemExit(7)\n"
        "if toy.ATTEMPT == 1: toy.wait_for('never')\n"
    )
    run = launch(recipe(source, nodes=2, nproc=1, resume="self"))
    assert run.wait() == 0, run.text
    assert run.log(0, attempt=1) == "attempt 1, no line end\n"
    assert run.log(1, node=1, attempt=2) == "attempt 2, no line end\n"
    assert "0:0 attempt 2, no line end" in run.text
    assert "1:1" not in run.text


def test_bytes_that_are_no_text_are_kept(launch: Launch, recipe: Recipe) -> None:
    source = "import os\nos.write(1, b'\\xff\\xfe\\n')\nprint('größe', '\\udcff')\n"
    run = launch(recipe(source, nproc=1))
    assert run.wait() == 0, run.text
    log = run.run.log(attempt=1, node=0, rank=0).read_bytes()
    assert log == b"" + b"\xff\xfe\n" + "größe \\udcff\n".encode()
