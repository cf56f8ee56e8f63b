"""`launch logs RUN`: the console of a run, or the output of chosen ranks."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.errors import ExitCode

if TYPE_CHECKING:
    from launcher.runs.rundir import RunDir

_POLL_S = 0.1
_POLL_FAR_S = 0.3
"""For the files of a run on a cluster; its scheduler is asked less often."""
_CHUNK_BYTES = 1 << 20


@click.command()
@click.argument("run", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="The output of this rank.")
@click.option("--node", type=click.IntRange(min=0), metavar="K", help="The ranks of this node.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Of this attempt; default: the newest.")
def logs(run: str, follow: bool, rank: int | None, node: int | None, attempt: int | None) -> int:
    """Output of RUN: rank 0 and the errors of all, or the whole output of chosen ranks."""
    from launcher.runs.find import find_run
    from launcher.runs.logs import select_logs

    found = find_run(run)

    def chosen(*, over: bool = True) -> list[Path]:
        if rank is node is attempt is None:
            # Of a run that never had a worker, all there is is what the agents' own Python said, or the job's bash.
            there = [found.console, *([found.agents_log, *found.job_logs()] if over else [])]
            return [path for path in there if path.exists() and path.stat().st_size][:1]
        return select_logs(found, rank=rank, node=node, attempt=attempt)

    if not follow:
        _show(found, chosen())
        return 0
    try:
        _follow(chosen, found, beside_console=rank is node is attempt is None)
    except KeyboardInterrupt:  # the way out of it; who has not started the run here may wonder
        print(f"\n{found.run_id} goes on; `launch cancel {run}` stops it", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return 0


def _show(run: RunDir, paths: Sequence[Path]) -> None:
    from launcher.errors import Problem, RecipeError

    if not paths:
        there = sorted(str(path.relative_to(run.path)) for path in (run.path / "logs").rglob("*.log"))
        hint = f"there is: {', '.join(there[:12])}" if there else _why_nothing(run)
        raise RecipeError([Problem(where=run.run_id, message="there is no such output", hint=hint)])
    for path in paths:
        _head(path, run, alone=len(paths) == 1)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _why_nothing(run: RunDir) -> str:
    from launcher.cli.story import Watch

    record = Watch(run).look()
    if record.on_sky:
        return f"nothing has come home yet, and what its machines say shows: {_skypilots(run)}"
    if not record.state.is_final:
        return "the run has written nothing yet; -f waits for it"
    return f"the run ended before it wrote anything: {record.state}" + f", {record.sentence}" * bool(record.sentence)


def _skypilots(run: RunDir) -> str:
    """SkyPilot's own command for the output of a run."""
    from launcher.runs.load import read_plan

    sky = read_plan(run).sky
    return "sky logs" if sky is None else shlex.join(sky.logs)


def _follow(chosen: Callable[..., list[Path]], run: RunDir, *, beside_console: bool) -> None:
    """Show what is added to the chosen logs, those of later attempts too, until the run has ended."""
    from launcher.cli.story import Story, Watch
    from launcher.runs.follow import Tail

    watch, story = Watch(run), Story(beside_console=beside_console)
    tails: dict[Path, Tail] = {}
    shown: Path | None = None
    while True:
        record = watch.look()
        ended = record.state.is_final
        for line in story.lines(record, now_s=time.time()):
            print(line, file=sys.stderr, flush=True)
        for path in chosen(over=ended and shown is None):
            tail = tails.setdefault(path, Tail(path))
            if text := tail.drain() if ended else tail.read():
                if path != shown:
                    _head(path, run, alone=shown is None)
                    shown = path
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
        if not run.path.exists():
            print(f"{run.path} was removed", file=sys.stderr)
            return
        if ended:
            # Not on standard output, which is the log and nothing else.
            print(f"{run.run_id}  {record.state}: {record.sentence}", file=sys.stderr)
            return
        time.sleep(_POLL_FAR_S if record.is_far else _POLL_S)


def _head(path: Path, run: RunDir, *, alone: bool) -> None:
    if not alone:
        sys.stdout.buffer.write(f"==> {path.relative_to(run.path)} <==\n".encode())
