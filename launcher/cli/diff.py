"""`launch diff A B`: how two runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.runs.curves import Apart
    from launcher.runs.diff import Row, RunDiff

_WIDTH = 40


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="The lines that differ in the code, too.")
def diff(first: str, second: str, as_json: bool, verbose: bool) -> None:
    """How run B differs from run A: recipe, code, environment, speed, memory, loss, metrics."""
    from launcher import redact
    from launcher.runs.diff import changed_text, compare, read_side
    from launcher.runs.find import find_run

    runs = find_run(first), find_run(second)
    found = compare(*map(read_side, runs))
    text = list(changed_text(runs[0].code, runs[1].code, found.files)) if verbose else []
    ids = (runs[0].run_id, runs[1].run_id)
    shown = json.dumps(diff_fields(ids, found, text), ensure_ascii=False) if as_json else diff_text(ids, found, text)
    print(redact.own().text(shown))


def diff_fields(ids: tuple[str, str], found: RunDiff, text: Sequence[str]) -> dict[str, Any]:
    """What `launch diff --json` says."""

    from dataclasses import asdict

    def values(rows: Sequence[Row]) -> dict[str, list[Any]]:
        return {row.key: [row.a, row.b] for row in rows}

    files = found.files
    changes = {"added": files.added, "removed": files.removed, "modified": files.modified}
    return {
        "runs": list(ids),
        "recipe": values(found.recipe),
        "code": {**values(found.code), "files": changes, "files_reason": found.files_reason, "text": list(text)},
        "environment": values(found.environment),
        "course": values(found.course),
        "loss": {**asdict(found.loss), "last": None if found.loss.last is None else list(found.loss.last)},
        "metrics": values(found.metrics),
    }


def diff_text(ids: tuple[str, str], found: RunDiff, text: Sequence[str]) -> str:
    """What `launch diff` says."""
    changes = found.files.lines()
    if found.files_reason and any(row.key == "sha256" for row in found.code):
        changes = [f"files: {found.files_reason}"]
    return "\n".join(
        [
            f"A  {ids[0]}",
            f"B  {ids[1]}",
            "",
            *_section("recipe", found.recipe),
            *_section("code", found.code, changes),
            *(f"  | {line}" for line in text),
            *_section("environment", found.environment),
            *(_section("speed and memory", [_readable(row) for row in found.course]) if found.course else ()),
            *loss_lines(found.loss),
            *_section("metrics", found.metrics),
        ]
    )


def _readable(row: Row) -> Row:
    """Seconds and bytes, as people read them, and how many times one is the other."""
    from launcher.runs.diff import Row

    a, b = (_quantity(row.key, value) for value in (row.a, row.b))
    times = f"   x {row.b / row.a:.2f}" if row.a and row.b else ""
    return Row(row.key, a, f"{b}{times}")


def _quantity(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.startswith("step "):
        return f"{1000 * value:.3g} ms"
    return f"{value:,.0f}" if name.startswith("samples/s") else f"{value / 2**20:,.0f} MiB"


def loss_lines(loss: Apart) -> Iterator[str]:
    """How far the curves of the loss are apart."""
    if loss.last is None:
        return
    step, a, b = loss.last
    if loss.first is None:
        yield f"loss: equal at all {loss.steps:,} steps that both have, at the last (step {step}) {a:.6g}"
        return
    yield f"loss: at step {step}, the last that both have, A {a:.6g}, B {b:.6g} ({b - a:+.3g})"
    yield f"  equal up to step {loss.first - 1}" if loss.first > 1 else "  different from the first step on"
    yield f"  furthest apart at step {loss.at_step}, by {loss.most:.3g}"


def _section(title: str, rows: Sequence[Row], more: Sequence[str] = ()) -> Iterator[str]:
    if not rows and not more:
        yield f"{title}: the same"
        return
    cells = [(row.key, _cell(row.a), _cell(row.b), _change(row)) for row in rows]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(3)]
    widths[1], widths[2] = max(widths[1], 1), max(widths[2], 1)
    head = (title, "A", "B", "")
    widths[0] = max(widths[0], len(title) - 2)
    yield "  ".join((head[0].ljust(widths[0] + 2), *map(str.ljust, head[1:3], widths[1:]))).rstrip()
    for line in cells:
        yield "  " + "  ".join((*map(str.ljust, line[:3], widths), line[3])).rstrip()
    for line_ in more:
        yield f"  {line_}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(text)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _change(row: Row) -> str:
    """What stands beside a metric: the difference of two numbers, `differ` or `equal` for weights."""
    if row.key == "weights_sha256":
        return "equal" if not row.differs else "differ"
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (row.a, row.b))
    return f"{row.b - row.a:+.4g}" if numbers and row.differs else ""
