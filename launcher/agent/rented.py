"""The agent of a node on a machine that is rented: it ends as the run does, and its record is kept elsewhere.

`start.py --rented URL --run-dir DIR --node K --head HOST:PORT`: the agent below a process which brings the record of
the run there first, copies away what the node writes, and exits with the code of the run: SkyPilot goes by that. URL
`none`: the record is on the machine alone. What speaks with the URL is a process of its own (`start.py --copy-record
...`): a bucket that hangs or refuses holds nobody up. Standard library only, but for fsspec in that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from launcher.agent.logs import say
from launcher.runs.events import EventWriter, parse_object, read_events
from launcher.runs.record_store import Copier, RecordStore, Stamp, stamps
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause

NOWHERE = "none"
EVERY_S = 15.0
"""How often what is new is copied; the loss of a machine takes what is newer."""
_LOOK_FOR_STOP_S = 5.0
_FETCH_S = 600.0
_FOUND = ".found.json"
"""In the run directory of a node: what was fetched, as it was then."""
_LOOK_S = 0.2
_LAST_S = 60.0
"""How long the last copy may take."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GOES_ON_AFTER = (Cause.NODE_LOST, Cause.PEER_LOST, Cause.RENDEZVOUS, Cause.PREEMPTED, Cause.LAUNCHER_LOST)
"""Ends that other machines are rented after. After any other the run is over, and stays so."""


def run_rented(url: str, argv: Sequence[str]) -> NoReturn:
    """Run the agent of a node, and exit as the run does. argv: its arguments."""
    run, node = RunDir(Path(argv[argv.index("--run-dir") + 1])), int(argv[argv.index("--node") + 1])
    heard: list[int] = []
    for signum in _SIGNALS:
        signal.signal(signum, lambda number, _: heard.append(number))
    if url != NOWHERE:
        if code := _to_its_end(["fetch", url, str(run.path)], limit_s=_FETCH_S):
            sys.exit(f"launch: {url} cannot be read, so whether the run has begun is not known (exit {code})")
        if (over := _take_over(run, node, url)) is not None:
            sys.exit(over)
    if heard:
        sys.exit(128 + heard[0])
    agent = subprocess.Popen([sys.executable, "-P", sys.argv[0], *argv], stdin=subprocess.DEVNULL)
    keeper = None if url == NOWHERE else _Keeper(url, run, node)
    while agent.poll() is None:
        while heard:
            agent.send_signal(heard.pop(0))
        if keeper is None:
            time.sleep(_LOOK_S)
        elif (asked := keeper.look()) is not None and node == 0:
            agent.send_signal(asked)
    code = agent.returncode if agent.returncode >= 0 else 128 - agent.returncode
    if node == 0 and code == 0 and (result := _result(run)) is not None:
        code = _code(result)
    if keeper is not None:
        keeper.finish()
    sys.exit(code)


class _Keeper:
    """The process that copies the record away, and another one when it has failed."""

    def __init__(self, url: str, run: RunDir, node: int) -> None:
        self._url, self._run, self._node = url, run, node
        self._process = _copier(url, run)
        self._again_s = 0.0

    def look(self) -> int | None:
        """Wait a little; the signal that somebody has asked for by way of the URL."""
        code = self._process.poll()
        if code is not None and time.monotonic() > self._again_s:
            self._again_s = time.monotonic() + EVERY_S
            say(self._run.console, f"node {self._node}: the record is not copied to {self._url} (exit {code})")
            self._process = _copier(self._url, self._run)
        assert self._process.stdout is not None
        watched = [self._process.stdout] if self._process.poll() is None else []
        if not select.select(watched, [], [], _LOOK_S)[0]:
            return None
        asked = self._process.stdout.readline().strip()
        return int(asked) if asked.isdigit() else None

    def finish(self) -> None:
        """Have what is left copied."""
        if self._process.poll() is not None:
            self._process = _copier(self._url, self._run)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # it copies what is left, and ends
        try:
            code = self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code:
            print(f"launch: node {self._node}: the last of the record was not copied to {self._url}", file=sys.stderr)


def _copier(url: str, run: RunDir) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", sys.argv[0], "--copy-record", "keep", url, str(run.path)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _to_its_end(words: Sequence[str], *, limit_s: float) -> int:
    argv = [sys.executable, "-P", sys.argv[0], "--copy-record", *words]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def _result(run: RunDir) -> dict[str, object] | None:
    return parse_object(run.result.read_bytes()) if run.result.exists() else None


def _code(result: Mapping[str, object]) -> int:
    code = result.get("exit_code")
    return code if isinstance(code, int) else 1


def _take_over(run: RunDir, node: int, url: str) -> int | None:
    """Go on with a run that other machines have begun; the exit code of one that is over."""
    result = _result(run)
    if result is not None and result.get("cause") not in {cause.value for cause in _GOES_ON_AFTER}:
        print(f"launch: the run is over: {result.get('state')}; nothing is started")
        return _code(result)
    begun = any(event["event"] == "attempt_started" for event in read_events(run.path))
    if result is not None:
        number = 1 + len(list(run.path.glob("result-*.json")))
        run.result.rename(run.path / f"result-{number}.json")
        if node == 0:
            _to_its_end(["withdraw", url, str(run.path)], limit_s=_FETCH_S)
    if node == 0 and (begun or result is not None):
        events = EventWriter(run.path, "keeper-0")
        events.write("requeued", how="rented", cause=Cause.NODE_LOST.value)
        # For whoever reads the record it is another launch of the same: its budget of restarts is whole.
        events.write("resumed", overrides=[], code="unchanged")
        events.write("submitted", ref=f"sky:{os.environ.get('LAUNCH_RUN_ID', run.run_id)}")
        events.close()
        say(run.console, "other machines: the run goes on from its newest checkpoint")
    return None


def copy_record(mode: str, url: str, run_dir: str) -> NoReturn:
    """The process that speaks with the URL.

    fetch: bring to a node what there is. home: bring it to the machine that launched. keep: copy what the node writes
    until standard input ends, and say on standard output which signal somebody asks for. stop:N asks for signal N;
    withdraw takes that back, and the result, for the run goes on.
    """
    store, run = RecordStore(url), RunDir(Path(run_dir))
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN if mode == "keep" else signal.SIG_DFL)
    if mode.startswith("stop:"):
        store.ask_to_stop(int(mode.partition(":")[2]))
    elif mode == "withdraw":
        store.withdraw()
    elif mode == "keep":
        _keep(store, Copier(store, run.path, found=_found(run)))
    else:
        store.fetch(run.path, old_logs=mode == "home")
        if mode == "fetch":
            (run.path / _FOUND).write_text(json.dumps(stamps(run.path)), encoding="utf-8")
    sys.exit(0)


def _found(run: RunDir) -> dict[str, Stamp]:
    """What was there before the agent was."""
    found = parse_object((run.path / _FOUND).read_bytes()) or {}
    return {name: (int(changed_ns), int(size_bytes)) for name, (changed_ns, size_bytes) in found.items()}


def _keep(store: RecordStore, copier: Copier) -> None:
    said, copied_s = False, time.monotonic()
    while not select.select([0], [], [], _LOOK_FOR_STOP_S)[0]:
        if not said and (asked := store.stop_asked()) is not None:
            print(asked, flush=True)
            said = True
        if time.monotonic() - copied_s >= EVERY_S:
            copier.copy()
            copied_s = time.monotonic()
    copier.copy(everything=True)
