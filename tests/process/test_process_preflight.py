"""The preflight of several nodes on this machine: real agents, real sockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import Launch, Recipe
from tiny import tiny

pytestmark = pytest.mark.process


def test_two_nodes_of_this_machine(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(tiny(train={"until": "3 steps"}, resources={"nodes": 2, "threads": 1})))
    run = launch(path, "faults.preflight=true")
    assert run.wait() == 0, run.text
    (found,) = run.happened("preflight")
    assert found["faults"] == []
    assert {node["interface"] for node in found["nodes"].values()} == {"lo"}
    assert "preflight: 2 nodes reach each other" in run.text
    kinds = [event["event"] for event in run.events]
    assert kinds.index("preflight") < kinds.index("attempt_started")


def test_it_is_before_the_first_attempt_alone_and_not_on_one_node(launch: Launch, recipe: Recipe) -> None:
    script = """
import os, sys
if os.environ["LAUNCH_ATTEMPT"] == "1" and os.environ["RANK"] == "0":
    sys.exit(3)
"""
    run = launch(recipe(script, nodes=2, resume="self"), "faults.preflight=true")
    assert run.wait() == 0, run.text
    assert len(run.happened("attempt_started")) == 2
    assert len(run.happened("preflight")) == 1
    run = launch(recipe(script, nodes=1, resume="self"), "faults.preflight=true")
    assert run.wait() == 0, run.text
    assert run.happened("preflight") == []
