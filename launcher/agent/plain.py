"""What a program has said, as text that is safe to show: no colours, titles or other orders to a terminal. Pure."""

from __future__ import annotations

import re

_ORDERS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])")
"""ANSI's: CSI (colours, cursor), OSC (titles, links), and the short ones."""


def plain(text: str) -> str:
    """Without orders to a terminal or characters that are not seen."""
    lines = _ORDERS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(each for each in lines if each.isprintable() or each in "\n\t")
