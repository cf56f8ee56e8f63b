"""What `launch explain` says of a rank is what that rank has found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

DUMPS = """
import json, os, pathlib
path = pathlib.Path(os.environ["LAUNCH_RUN_DIR"], f"env.{os.environ['RANK']}.json")
path.write_text(json.dumps(dict(os.environ)))
"""
OURS = {"_", "SHLVL", "PWD", "OLDPWD", "LAUNCH_CLOCK_FD"}
"""Names that shells and wrappers of `python` change on the way, and the number of a descriptor, which nobody plans."""


def test_every_variable_of_a_rank_is_explained_with_its_value(
    launch: Launch, recipe: Recipe, command: Callable[..., CompletedProcess[str]]
) -> None:
    run = launch(
        recipe(DUMPS, nodes=2, nproc=1, env={"GREETING": "hello world"}, network={"nccl": {"DEBUG": "WARN"}}),
        env={"NCCL_ASYNC_ERROR_HANDLING": "3"},
    )
    assert run.wait() == 0, run.text
    for rank in (0, 1):
        found = json.loads((run.run.path / f"env.{rank}.json").read_text())
        said = json.loads(command("explain", run.run_id, "--rank", str(rank), "--json").stdout)
        (rows,) = said["sections"].values()
        explained = {row["name"]: row["value"] for row in rows}
        assert explained.items() <= found.items()
        assert all(row["origin"] for row in rows)
        inherited = {name for name, value in os.environ.items() if found.get(name) == value}
        assert found.keys() - explained.keys() - inherited - OURS == set()

    (supervisor,) = run.happened("supervisor_started")
    everything = command("explain", run.run_id).stdout
    channel = supervisor["channel"]
    assert f"agents     {channel['address']}:{channel['port']}" in everything
    (attempt,) = run.happened("attempt_started")
    assert f"attempt 1  {attempt['master_addr']}:{attempt['master_port']}" in everything
    assert "NCCL_ASYNC_ERROR_HANDLING" in everything, "the old name that was taken out"
