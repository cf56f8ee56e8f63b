"""Events: whole lines, one writer per file, merged by time."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.events import EventWriter, read_events


def test_events_of_all_writers_are_read_in_the_order_of_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((1.0, 2.0, 3.0, 4.0))
    monkeypatch.setattr("launcher.runs.events.time.time", lambda: next(clock))
    writers = [EventWriter(tmp_path, name) for name in ("b", "a")]
    for number in range(4):
        writers[number % 2].write("said", number=number)
    for writer in writers:
        writer.close()
    assert [event["number"] for event in read_events(tmp_path)] == [0, 1, 2, 3]


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    EventWriter(tmp_path, "a").write("said", text="é\n")
    with (tmp_path / "events" / "a.jsonl").open("a") as file:
        file.write('{"time": 1')
    assert [event["text"] for event in read_events(tmp_path)] == ["é\n"]


@pytest.mark.parametrize("name", ["time", "writer"])
def test_a_field_cannot_take_the_place_of_what_every_event_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"said: {name} belongs to every event"):
        EventWriter(tmp_path, "a").write("said", **{name: {}})


def test_without_events_there_are_none(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


def test_a_spoiled_line_does_not_hide_the_rest(tmp_path: Path) -> None:
    """Zeros after a power cut, half a line, something that is no event: `launch ls` goes on."""
    writer = EventWriter(tmp_path, "head")
    writer.write("first")
    with (tmp_path / "events" / "head.jsonl").open("ab") as file:
        file.write(b'\x00\x00\n[1]\n{"no": "event"}\n{"event": "odd", "time": {"a": 1}}\n{"half')
    names = [event["event"] for event in read_events(tmp_path)]
    assert sorted(names) == ["first", "odd"]


def test_half_a_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    """Of a writer whose node, or disk, has failed; its successor goes on in the same file."""
    EventWriter(tmp_path, "head").write("first")
    with (tmp_path / "events" / "head.jsonl").open("ab") as file:
        file.write(b'{"time": 17, "writer": "he')
    EventWriter(tmp_path, "head").write("second")
    EventWriter(tmp_path, "head").write("third")
    assert [event["event"] for event in read_events(tmp_path)] == ["first", "second", "third"]
