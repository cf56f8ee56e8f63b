"""From a cut link to the next new step of the survivors: two machines (network namespaces), one of which is cut off.

`python tests/bench/linkcut.py [--rounds 3] [--cap 300] [--json]`, as root. Ours at its defaults, with `--nodes 1:2`;
torchrun with the careful script at its best knobs: two agents of `--nnodes 1:2`, a time-out of 10 s for collectives,
short ones in the rendezvous. Where nothing new comes within the cap, the cap counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import BIN, CPU_NOTE, SCRIPTS
from training import BATCH, DATA, EVERY, LR, MODEL, ROOT

sys.path.insert(0, str(ROOT / "tests" / "contract"))

from hosts import Bed, HostsRun

LIMIT_S = 20.0
_LOOK_S = 0.02
_PORT = 29400
_CONF = "timeout=20,join_timeout=20,last_call_timeout=1,close_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"


def newest(path: Path) -> int:
    """The newest step that is written down."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines[-300:] if line.endswith(b"}")), default=0)


def cut_and_wait(bed: Bed, steps: Path, *, cap_s: float) -> float:
    """Let it train, cut the second machine off, wait for a step that is new."""
    by_s = time.monotonic() + 120.0
    while newest(steps) < EVERY + EVERY // 2:
        if time.monotonic() > by_s:
            raise TimeoutError(f"no step {EVERY + EVERY // 2} within 120 s")
        time.sleep(_LOOK_S)
    bed.hosts[1].cut()
    cut_s = time.monotonic()
    time.sleep(0.5)  # the step that was under way may have been completed by all
    before = newest(steps)
    while newest(steps) <= before and time.monotonic() - cut_s < cap_s:
        time.sleep(_LOOK_S)
    return min(cap_s, time.monotonic() - cut_s)


def ours(bed: Bed, cap_s: float) -> float:
    """One agent on each machine, at the defaults."""
    recipe = {
        "name": "bench",
        "model": {"name": "mlp", **MODEL},
        "data": {"name": "synthetic", "global_batch_size": BATCH, **DATA},
        "train": {"until": "10M steps", "optimizer": {"name": "adamw", "lr": LR}, "eval_every": None},
        "checkpoint": {"every": f"{EVERY} steps", "keep": 2},
        "resources": {"nproc_per_node": 1, "threads": 1, "device": "cpu"},
        "tracking": {"wandb": {"mode": "disabled"}},
    }
    path = bed.folder / "bench.yaml"
    path.write_text(json.dumps(recipe))
    run: HostsRun = bed.plan(path, nodes="1:2")
    run.start()
    return cut_and_wait(bed, run.run.metrics, cap_s=cap_s)


def torchrun(bed: Bed, cap_s: float) -> float:
    """One torchrun on each machine; the first one hosts the rendezvous."""
    settings = {"model": MODEL, "data": DATA, "batch": BATCH, "lr": LR, "every": EVERY}
    out = bed.folder / "out"
    out.mkdir()
    env = {
        "OUT": str(out),
        "SETTINGS": json.dumps(settings),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    argv = [
        *(str(BIN / "torchrun"), "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "100"),
        *("--monitor-interval", "0.01", "--rdzv-backend", "c10d", "--rdzv-id", "bench", "--rdzv-conf", _CONF),
        *("--rdzv-endpoint", f"{bed.hosts[0].address}:{_PORT}"),
    ]
    for host in bed.hosts:
        host.start([*argv, "--local-addr", host.address, str(SCRIPTS / "careful.py")], env=env, output=out / "log")
    return cut_and_wait(bed, out / "steps.jsonl", cap_s=cap_s)


CONTENDERS: dict[str, Callable[[Bed, float], float]] = {"torchrun": torchrun, "launch": ours}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cap", type=float, default=300.0, help="seconds")
    parser.add_argument("--json", action="store_true", help="a last line with the medians")
    options = parser.parse_args()
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name, measure in CONTENDERS.items():
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                bed = Bed(Path(folder), 2)
                try:
                    took[name].append(measure(bed, options.cap))
                finally:
                    bed.remove()
    print(f"\nA link is cut: seconds to the next new step of the survivors (cap {options.cap:g} s)\n  {CPU_NOTE}")
    medians = {name: statistics.median(values) for name, values in took.items()}
    for name, values in took.items():
        print(f"  {name:10} {medians[name]:8.1f} s  [{min(values):.1f} - {max(values):.1f}]  n={len(values)}")
    if medians["launch"] > LIMIT_S:
        print(f"  ABOVE the limit of {LIMIT_S:g} s")
    if options.json:
        print(json.dumps({"ratios": {"linkcut": medians["launch"] / medians["torchrun"]}, "medians_s": medians}))


if __name__ == "__main__":
    main()
