"""A run of MIN:MAX nodes on the real cluster: what the job gets, and what it loses."""

from __future__ import annotations

import json
from pathlib import Path

import criteria
import pytest
from slurm_cluster import SlurmCluster, cut_off
from slurm_launched import OnSlurm
from tiny import tiny

pytestmark = [pytest.mark.process, pytest.mark.needs("slurm"), pytest.mark.timeout(240)]

STEPS = 1200


def test_a_job_of_two_to_three_nodes_goes_on_with_two_when_one_is_cut_off(
    on_slurm: OnSlurm, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """In the same allocation, which SLURM does not end."""
    recipe = tiny(
        train={"until": f"{STEPS} steps", "eval_every": None},
        checkpoint={"every": "100 steps"},
        resources={"nproc_per_node": 1, "threads": 1, "device": "cpu"},
    )
    recipe["data"]["global_batch_size"] = 12
    recipe["model"]["dropout"] = 0.0
    whole = criteria.undisturbed(tmp_path, recipe, nodes=3)
    path = tmp_path / "elastic.yaml"
    path.write_text(json.dumps(recipe))
    run = on_slurm(path, "--nodes", "2:3", 'slurm.sbatch={nodelist: "n2,n3,n4"}', env=criteria.install(tmp_path))
    run.wait_for_event("checkpoint_saved")
    lost = run.happened("allocation_started")[0]["nodes"][2]
    before = max(criteria.losses(run.run))
    with cut_off(slurm_cluster, lost):
        assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    assert [event["world_size"] for event in run.happened("training_started")] == [3, 2]
    assert len(run.happened("allocation_started")) == 1
    assert run.result["restarts"] == 0, "the loss of a node is no fault of the run"
    criteria.assert_once(run.run, whole)
    criteria.assert_close(run.run, whole, until=before)


@pytest.mark.long
def test_a_job_that_has_lost_its_first_node_is_queued_again_by_another(
    on_slurm: OnSlurm, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """SLURM keeps a job of MIN:MAX nodes, and on its first node was all that could end it or go on."""
    recipe = tiny(
        train={"until": "10000000 steps", "eval_every": None},  # it goes on alone on the node that is cut off
        checkpoint={"every": "100 steps"},
        resources={"nproc_per_node": 1, "threads": 1, "device": "cpu"},
    )
    path = tmp_path / "headless.yaml"
    path.write_text(json.dumps(recipe))
    run = on_slurm(path, "--nodes", "1:2")
    run.wait_for_event("checkpoint_saved")
    first = run.happened("allocation_started")[0]["nodes"][0]
    with cut_off(slurm_cluster, first):
        asked = run.wait_for_event("requeued", allocation=1)
        assert (asked["writer"], asked["how"], asked["cause"]) == ("task-1", "requeue", "node_lost")
        began = run.wait_for_event("allocation_started", allocation=2)
        assert first not in began["nodes"]
        attempt = run.wait_for_event("attempt_started", allocation=2)["attempt"]
        assert run.wait_for_event("training_started", attempt=attempt)["step"] > 0
