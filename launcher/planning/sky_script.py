"""What SkyPilot runs on each machine, as bash: once before the run (`setup`), and the agent of the node (`run`). Pure.

SkyPilot sets SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS (one address a line, the first is node 0) and SKYPILOT_NUM_NODES.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.planning.engine import OLDEST_PYTHON, TORCH_BELOW, TORCH_FROM, version_text

TOKEN = "LAUNCH_TOKEN"
"""The variable, a secret of SkyPilot's, by which the secret of the agents' channel reaches the machines."""
ENVIRONMENT = "/tmp/launch/env"
"""Where the environment is made on a machine that has none of its own: the machine is there for this run alone."""
_PYTHON = "3.12"
_OF_STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Scheme of a URL -> the package with which fsspec reaches it."""
_OF_JOBS = ("numpy", "pydantic", "xxhash", "wandb")
"""What the training program needs besides torch; each is imported by its own name."""

_RUN = """\
set -euo pipefail
run_dir={run_dir}
fail() {{ echo "launch: $1" >&2; exit 1; }}
: "${{SKYPILOT_NODE_RANK:?SkyPilot sets it}}" "${{SKYPILOT_NODE_IPS:?SkyPilot sets it}}"
[ "${{SKYPILOT_NUM_NODES:-}}" = {nodes} ] || fail "${{SKYPILOT_NUM_NODES:-no}} machines, and the plan has {nodes}"
mkdir -p "$run_dir" 2>/dev/null || {{ sudo mkdir -p "$run_dir" && sudo chown "$(id -u):$(id -g)" "$run_dir"; }}
cp -R {payload}/. "$run_dir"/
[ -n "${{{token}:-}}" ] || fail "{token} is not set: \\`launch\\` gives it to SkyPilot as a secret"
(umask 077; printf %s "${token}" > "$run_dir/token")
unset {token}
head=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
case $head in *:*) head="[$head]" ;; esac
exec {python} -P "$run_dir/agent/start.py" --rented {record} \\
  --run-dir "$run_dir" --node "$SKYPILOT_NODE_RANK" --head "$head:{port}"
"""


def run_script(*, run_dir: str, payload: str, nodes: int, python: str, port: int, store: str) -> str:
    """The agent of a node. payload: where SkyPilot has put the files of the run, as bash writes it."""
    return _RUN.format(
        run_dir=shlex.quote(run_dir),
        payload=payload,
        nodes=nodes,
        token=TOKEN,
        python=shlex.quote(python),
        record=shlex.quote(store or "none"),
        port=port,
    )


def setup_script(*, python: str, image: bool, is_script: bool, store: str) -> str:
    """What makes the interpreter of the workers ready. It stops where the machine cannot be made so."""
    modules = ["torch", *(() if is_script else _OF_JOBS)]
    if package := _OF_STORES.get(store.partition("://")[0]):
        modules.append(package)
    torch = f"torch>={version_text(TORCH_FROM)},<{version_text(TORCH_BELOW)}"
    packages = [torch if module == "torch" else module for module in modules]
    if not image:
        return "\n".join(
            [
                "set -euo pipefail",
                "python3 -m pip install --quiet uv",
                f"[ -x {ENVIRONMENT}/bin/python ] || python3 -m uv venv --quiet --python {_PYTHON} {ENVIRONMENT}",
                f"python3 -m uv pip install --quiet --python {ENVIRONMENT}/bin/python {_words(packages)}",
                "",
            ]
        )
    # The torch of an image is left as it is: it belongs to its CUDA.
    oldest = ", ".join(map(str, OLDEST_PYTHON))
    needs = f"{version_text(OLDEST_PYTHON)} or newer, with torch, is needed"
    check = f"import sys, torch; sys.exit(sys.version_info < ({oldest}) and sys.version)"
    lines = [
        "set -euo pipefail",
        f"{shlex.quote(python)} -c {shlex.quote(check)} || {{ echo 'launch: the image: Python {needs}' >&2; exit 1; }}",
        *(
            f"{shlex.quote(python)} -c 'import {module}' 2>/dev/null || "
            f"{shlex.quote(python)} -m pip install --quiet {module}"
            for module in modules[1:]
        ),
    ]
    return "\n".join([*lines, ""])


def _words(packages: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, packages))
