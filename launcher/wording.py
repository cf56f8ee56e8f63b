"""How things are put for people: counts, ranges, spans of time, signals, long texts. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence


def count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `1,024 nodes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def between(least: int | None, most: int, noun: str) -> str:
    """`4 nodes`, or `1 to 4 nodes` where fewer will do."""
    return count(most, noun) if least is None or least == most else f"{least} to {count(most, noun)}"


def ranges(numbers: Iterable[int], separator: str = ",") -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return separator.join("-".join(map(str, run)) for run in runs)


def duration(time_s: float) -> str:
    """In a sentence: `0.4 s`, `21 s`, `3 min 05 s`, `2 h 10 min`."""
    if time_s < 10:
        return f"{time_s:.1f} s"
    whole = round(time_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def short_duration(time_s: float) -> str:
    """In a table or headline: `0.4s`, `21s`, `3m05s`, `6h12m`, `2d04h`."""
    if time_s < 10:
        return f"{time_s:.1f}s"
    whole = round(time_s)
    for small, large, size, smaller in (("h", "d", 86400, 3600), ("m", "h", 3600, 60), ("s", "m", 60, 1)):
        if whole >= size:
            return f"{whole // size}{large}{whole % size // smaller:02d}{small}"
    return f"{whole}s"


def size(size_bytes: float) -> str:
    """`1.5 GiB`, `12.0 MiB`, `3.4 KiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:,.1f} {unit}"
    return f"{size_bytes / 1024:.1f} KiB"


def signal_name(signum: int) -> str:
    """`SIGKILL`, or `signal 33` for one without a name."""
    return signal.Signals(signum).name if signum in {each.value for each in signal.Signals} else f"signal {signum}"


def first_line(text: object) -> str:
    """Of a message; empty for None."""
    return next(iter(str(text or "").splitlines()), "")


def shortened(text: str, width: int) -> str:
    """So many characters, and `...` in place of the rest."""
    return text if len(text) <= width else f"{text[:width]} ..."


def step_text(step: int | None, total: int | None) -> str:
    """`120/632`, or `120` where the end is not known; empty where nothing is."""
    if step is None:
        return ""
    return f"{step}/{total}" if total else str(step)


def short_hosts(hosts: Sequence[str]) -> str:
    """`n1, n2`; of many `n1 ... n64 (64 nodes)`."""
    return ", ".join(hosts) if len(hosts) <= 4 else f"{hosts[0]} ... {hosts[-1]} ({len(hosts)} nodes)"


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows of equal length as lines of columns, two spaces apart. `right`: the columns (of numbers) to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
