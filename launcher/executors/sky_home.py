"""The record of a run on rented machines comes home: from the URL where the nodes keep it, else from the machines.

SkyPilot writes an entry of its cluster into the ssh configuration of whoever launches: `ssh CLUSTER` is node 0,
`ssh CLUSTER-workerK` node K.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.planning import calls
from launcher.planning.plan import AGENT_START, Plan, SkyPlan
from launcher.runs.record_store import is_of_record

if TYPE_CHECKING:
    from launcher.runs.rundir import RunDir

EVERY_S = 20.0
_COPY_S = 300.0
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PACK = """\
cd {run_dir} || exit
find events logs devices profile metrics.jsonl evals.jsonl result*.json -type f -newer plan.json -print0 2>/dev/null |
  tar --null -T - -cf - 2>/dev/null
"""


def bring_home(plan: Plan, run: RunDir, *, machines: bool, last: bool) -> bool:
    """Copy what is new in the record of the nodes into this run directory, not too often. False: it did not work.

    machines: whether they are up. last: they will not be for long.
    """
    assert plan.sky is not None
    mark = run.path / "sky" / "home"
    if not last and mark.exists() and time.time() - mark.stat().st_mtime < EVERY_S:
        return True
    if plan.sky.store:
        came = copy_record("home", plan.sky.store, run.path)
    else:
        came = machines and _from_machines(plan.sky, run.path, len(plan.nodes))
    if came:
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    return came


def copy_record(mode: str, url: str, run_dir: Path) -> bool:
    """Have another process speak with the URL (see `agent/rented.py`). False: it could not."""
    argv = [sys.executable, "-P", AGENT_START, "--copy-record", mode, url, str(run_dir)]
    try:
        return calls.run(argv, limit_s=_COPY_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _from_machines(sky: SkyPlan, run_dir: Path, nodes: int) -> bool:
    """From each of them, also after one that does not answer."""
    came = [_from_node(sky, run_dir, node) for node in range(nodes)]
    return all(came)


def _from_node(sky: SkyPlan, run_dir: Path, node: int) -> bool:
    """What a node has written, whole files, by one call of ssh. Each file has one writer, so none is two nodes'."""
    host = sky.name if node == 0 else f"{sky.name}-worker{node}"
    # plan.json was there before the agent, so what is newer the agent has written.
    script = _PACK.format(run_dir=shlex.quote(str(run_dir)))
    try:
        done = subprocess.run(
            [*_SSH, host, script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COPY_S,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode:
        return False
    if done.stdout:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                if member.isfile() and is_of_record(member.name):
                    _keep(archive, member, run_dir)
    return True


def _keep(archive: tarfile.TarFile, member: tarfile.TarInfo, run_dir: Path) -> None:
    target, source = run_dir / member.name, archive.extractfile(member)
    assert source is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.tmp")
    part.write_bytes(source.read())
    os.replace(part, target)  # noqa: PTH105 - over one that is there
