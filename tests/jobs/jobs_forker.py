"""A preloaded process that only forks workers, as the agent's does: one import of torch for all process tests.

Commands, one JSON object per line: {"start": {"env", "argv", "cwd", "log"}} -> {"pid"},
{"wait": pid, "timeout_s": s} -> {"exit_code"} (128 + n for signal n, None where it still runs).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from typing import Any


def become_worker(order: dict[str, Any]) -> int:
    for fd in (0, 1, 2):
        os.close(fd)
    os.open(os.devnull, os.O_RDONLY)
    os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(1, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - of the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.setpgid(0, 0)
    sys.path[:0] = order["path"]
    for module in order["load"]:
        runpy.run_path(module)
    from jobs.train import main
    from launcher.agent.zygote import _unshare_random_state

    _unshare_random_state()
    return main(order["argv"])


def start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = become_worker(order)
    except BaseException:  # noqa: BLE001 - the last frame of a process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, timeout_s: float) -> int | None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.005)
    return None


if __name__ == "__main__":
    import jobs.train  # noqa: F401

    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            print(json.dumps({"pid": start(command["start"])}), flush=True)
        else:
            print(json.dumps({"exit_code": wait(command["wait"], command["timeout_s"])}), flush=True)
