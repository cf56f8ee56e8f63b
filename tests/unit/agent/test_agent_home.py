"""What of a run directory goes home, and what is not sent twice."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

from launcher.agent.home import checksum, files_of, send


def write(run: Path, path: str, text: str) -> Path:
    file = run / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def sent(run: Path, known: dict[str, tuple[int, int, int | None]]) -> dict[str, tuple[int, bytes]]:
    """What `send` writes: offset and bytes by path."""
    out = io.BytesIO()
    send(run, known, out)
    out.seek(0)
    found: dict[str, tuple[int, bytes]] = {}
    while not (head := json.loads(out.readline())).get("end"):
        found[head["path"]] = head["offset"], out.read(head["size"])
    return found


def known_of(file: Path, *, grows: bool) -> tuple[int, int, int | None]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, checksum(file, found.st_size) if grows else None


def test_what_came_from_there_and_what_is_not_whole_stays(tmp_path: Path) -> None:
    for path in ("plan.json", "token", "events/launch-1.jsonl", "events/watch-a-1.jsonl", "hosts/node-0.pid", "x.tmp"):
        write(tmp_path, path, "1")
    for path in ("checkpoints/step-3.tmp-1/a", "agent/start.py", "replica/metrics.jsonl", "checkpoints/.probe"):
        write(tmp_path, path, "1")
    for path in ("result.json", "out/model.bin", "events/head.jsonl", "checkpoints/step-2/a", "plan-notes.json"):
        write(tmp_path, path, "1")
    wanted = ["checkpoints/step-2/a", "events/head.jsonl", "out/model.bin", "plan-notes.json", "result.json"]
    assert list(files_of(tmp_path)) == wanted


def test_a_file_that_grows_travels_from_where_it_was(tmp_path: Path) -> None:
    file = write(tmp_path, "events/head.jsonl", "one\n")
    known = {"events/head.jsonl": known_of(file, grows=True)}
    assert sent(tmp_path, known) == {}
    file.write_text("one\ntwo\n")
    assert sent(tmp_path, known) == {"events/head.jsonl": (4, b"two\n")}


def test_a_file_that_was_begun_anew_is_sent_whole(tmp_path: Path) -> None:
    file = write(tmp_path, "metrics.jsonl", "one\n")
    known = {"metrics.jsonl": known_of(file, grows=True)}
    file.write_text("other\nlines\n")
    assert sent(tmp_path, known) == {"metrics.jsonl": (0, b"other\nlines\n")}


def test_an_old_copy_does_not_come_back(tmp_path: Path) -> None:
    write(tmp_path, "events/node-1.jsonl", "one\n")
    write(tmp_path, "metrics.jsonl", "one\n")
    longer = dict.fromkeys(("events/node-1.jsonl", "metrics.jsonl"), (8, 0, 1))
    assert sent(tmp_path, longer) == {"metrics.jsonl": (0, b"one\n")}


def test_other_files_are_sent_when_they_are_newer(tmp_path: Path) -> None:
    file = write(tmp_path, "out/a.txt", "one")
    known = {"out/a.txt": known_of(file, grows=False)}
    assert sent(tmp_path, known) == {}
    file.write_text("two")
    os.utime(file, ns=(0, known["out/a.txt"][1] + 1))
    assert sent(tmp_path, known) == {"out/a.txt": (0, b"two")}
