"""What a program has said, as it is shown."""

from __future__ import annotations

import pytest

from launcher.agent.plain import plain


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("größe ☃\n\tagain", "größe ☃\n\tagain"),
        ("\x1b[1;31mError:\x1b[0m bad", "Error: bad"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\a link\x1b]8;;\x1b\\", "a link"),
        ("\x1b]0;never ended", ""),
        ("\x1bcall gone\x1b(B", "all gone"),
        ("a\x00b\x08c\u202ed\ud800", "abcd"),
        ("old\rMac", "old\nMac"),
        ("dos\r\nlines\r\n", "dos\nlines\n"),
    ],
)
def test_orders_to_a_terminal_are_left_out(said: str, shown: str) -> None:
    assert plain(said) == shown
