"""An agent that needs no connection: `start.py --detached --run-dir DIR --node K --head ADDRESS:PORT`, called by ssh.

What was called ends as soon as the agent is known by its pid and start time, in `hosts/node-K.pid`. A process of ours
stays beside the agent, and writes its exit code to `hosts/node-K.exit`. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from launcher.agent import proc
from launcher.runs.rundir import RunDir

FLAG = "--detached"


def detach(argv: list[str]) -> None:
    """Go on in a process of its own, whose output goes to the run directory; the one that was called ends here.

    argv: what follows the flag. Standard input may have one JSON object: variables that are set for the agent alone,
    which no command line and no file holds. Exits with a sentence where the run directory cannot be written.
    """
    sys.orig_argv.remove(FLAG)  # the agent may start itself again, after `setup`
    run, node = RunDir(Path(argv[argv.index("--run-dir") + 1])), int(argv[argv.index("--node") + 1])
    given = sys.stdin.buffer.read()
    os.environ.update(json.loads(given) if given.strip() else {})
    known, told = os.pipe()
    if (first := os.fork()) != 0:
        os.close(told)
        said = os.read(known, 4096)
        if said == b"up":
            os._exit(0)
        os.waitpid(first, 0)
        sys.exit(f"launch: node {node}: {said.decode(errors='replace') or 'the agent ended before it began'}")
    os.close(known)
    os.setsid()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    try:
        agent = _agent(run, node)
        if agent == 0:
            os.close(told)
            return
    except OSError as error:
        os.write(told, f"{error.filename or run.path}: {error.strerror}".encode(errors="replace"))
        os._exit(1)
    os.write(told, b"up")
    os.close(told)
    code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    _write(run.node_exit(node), str(code if code >= 0 else 128 - code))
    os._exit(0)


def _agent(run: RunDir, node: int) -> int:
    """Fork the agent; 0 in it, its pid in the process that stays beside it. Raises OSError."""
    run.hosts.mkdir(exist_ok=True)
    run.node_log(node).parent.mkdir(exist_ok=True)
    log = os.open(run.node_log(node), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    run.node_exit(node).unlink(missing_ok=True)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # It waits until it is written down who it is.
    held, let = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(let)
        if not os.read(held, 1):
            os._exit(1)
        os.close(held)
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return 0
    os.close(held)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    _write(run.node_pid(node), f"{pid} {proc.start_time(pid) or 0} {boot}")
    os.write(let, b"!")
    os.close(let)
    return pid


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{text}\n", encoding="ascii")
    new.rename(path)
