"""The task of SkyPilot: what is asked for, what runs on each machine, and what is refused before anything is rented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_values import facts, job, plan, script

from launcher.errors import RecipeError
from launcher.planning.code import CodeFacts
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan, SkyPlan
from launcher.recipe.loader import load_recipe
from launcher.recipe.profiles import read_profile
from launcher.recipe.schema import Recipe
from launcher.runs.create import resolved_recipe

ROOT = Path(__file__).parents[3]
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))
URL = {"store": "s3://bucket/runs"}


def rented(recipe: Recipe, **changes: Any) -> Plan:
    return plan(recipe, facts(**changes), executor="sky")


def sky_of(made: Plan) -> SkyPlan:
    assert made.sky is not None
    return made.sky


def task_of(made: Plan) -> dict[str, Any]:
    return dict(yaml.safe_load(sky_of(made).task))


def refused(recipe: Recipe, **changes: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        rented(recipe, **changes)
    return [problem.message for problem in caught.value.problems]


def test_nothing_of_this_machine_decides_about_the_rented_ones() -> None:
    made = rented(job(sky={"accelerators": "H100:4", "infra": "aws"}), gpus=1, cpus=2)
    assert (made.device, made.nproc_per_node, made.nodes[0].gpus) == ("cuda", 4, (0, 1, 2, 3))
    assert (made.nodes[0].host, made.nodes[0].address, made.nodes[0].cpus) == ("", "", ())
    assert rented(job(), gpus=8).device == "cpu"


def test_what_nobody_has_said_is_left_to_skypilot() -> None:
    assert task_of(rented(job()))["resources"] == {"autostop": {"idle_minutes": 10, "down": True}}


def test_everything_that_is_said_arrives() -> None:
    said = {
        "infra": "gcp/us-central1",
        "accelerators": "A100:8",
        "cpus": "16+",
        "memory": "64",
        "image": "team/image:1",
        "disk_size": 300,
        "max_hourly_cost": 20.0,
        "autostop": "30m",
        "resources": {"disk_tier": "high", "any_of": ({"infra": "gcp"}, {"infra": "aws"})},
    }
    made = rented(job(sky=said, resources={"nodes": 4}, checkpoint=URL, batch=1024))
    task = task_of(made)
    assert task["num_nodes"] == 4
    assert task["resources"] == {
        "infra": "gcp/us-central1",
        "accelerators": "A100:8",
        "cpus": "16+",
        "memory": "64",
        "image_id": "docker:team/image:1",
        "disk_size": 300,
        "network_tier": "best",
        "max_hourly_cost": 20.0,
        "autostop": {"idle_minutes": 30, "down": True},
        "disk_tier": "high",
        "any_of": [{"infra": "gcp"}, {"infra": "aws"}],
    }
    assert "at most $80.00 per hour (4 nodes x $20)" in sky_of(made).price


@pytest.mark.parametrize(
    ("infra", "accelerators", "nodes", "tier"),
    [
        ("aws", "H100:8", 2, "best"),
        ("aws", "H100:8", 1, None),
        ("aws", None, 2, None),
        ("lambda", "H100:8", 2, None),
        ("nebius", "H100:8", 2, "best"),
        ("nebius", "H100:1", 2, None),
        (None, "H100:8", 2, None),
    ],
)
def test_a_fast_network_is_asked_for_where_it_is_not_an_error(
    infra: str | None, accelerators: str | None, nodes: int, tier: str | None
) -> None:
    sky = {"infra": infra, "accelerators": accelerators}
    made = rented(job(sky=sky, resources={"nodes": nodes}, checkpoint=URL))
    assert task_of(made)["resources"].get("network_tier") == tier
    assert any("usual network" in note for note in made.notes) == (infra is None and nodes > 1)


@pytest.mark.parametrize("image", ["ami-0abc", "docker:mine", "projects/p/global/images/i", "skypilot:gpu-debian-11"])
def test_an_image_of_a_cloud_stays_as_it_is(image: str) -> None:
    assert task_of(rented(job(sky={"image": image})))["resources"]["image_id"] == image


def test_spot_is_a_managed_job_which_needs_a_place_for_its_checkpoints() -> None:
    made = rented(job(sky={"spot": True}, checkpoint=URL))
    sky, resources = sky_of(made), task_of(made)["resources"]
    assert sky.managed
    assert resources == {"use_spot": True}
    assert sky.submit[:3] == ("sky", "jobs", "launch")
    assert sky.remove == ()
    assert sky.store == "s3://bucket/runs/r0/record"
    assert refused(job(sky={"spot": True})) == [
        "sky.spot: machines that are taken away take the checkpoints along (checkpoint.store: shared)"
    ]


def test_a_cluster_of_its_own_is_taken_down() -> None:
    sky = sky_of(rented(job()))
    assert not sky.managed
    assert sky.submit == (
        *("sky", "launch", "--yes", "--detach-run", "--cluster", "r0", "--secret", "LAUNCH_TOKEN"),
        "/home/ada/project/runs/r0/sky/task.yaml",
    )
    assert sky.remove == ("sky", "down", "--yes", "r0")


def test_secrets_are_named_and_no_more() -> None:
    made = rented(job(secrets=("WANDB_API_KEY",)))
    assert task_of(made)["secrets"] == {"LAUNCH_TOKEN": None, "WANDB_API_KEY": None}
    assert sky_of(made).submit[-5:-1] == ("--secret", "LAUNCH_TOKEN", "--secret", "WANDB_API_KEY")


def test_several_machines_share_no_folder() -> None:
    assert "share no folder" in refused(job(resources={"nodes": 2}))[0]
    rented(job(resources={"nodes": 2}, checkpoint={"store": "replicate"}))


def test_all_that_is_wrong_is_said_at_once() -> None:
    sky = {"instance_type": "p5", "resources": {"cpus": 4}, "spot": True, "managed": False}
    found = refused(job(sky=sky, resources={"device": "cuda", "nodes": 2}))
    assert len(found) == 5, found


def test_the_workers_of_a_script_run_in_the_copy_of_its_code() -> None:
    code = CodeFacts(root="/home/ada/project", snapshot=True)
    made = rented(script(), code=code)
    assert made.worker.script == "/home/ada/project/runs/r0/code/train.py"
    assert made.worker.cwd == "/home/ada/project/runs/r0/code"
    assert resolved_recipe(made)["workdir"] == "/home/ada/project"
    assert "~/.launch/r0/code" in task_of(made)["file_mounts"]


def test_code_that_cannot_be_copied_is_refused() -> None:
    code = CodeFacts(root="/home/ada", snapshot=False, reason="it is too big")
    assert refused(script(), code=code) == ["workdir: /home/ada cannot be copied to the machines: it is too big"]


@pytest.mark.parametrize(
    "recipe",
    [
        job(),
        job(resources={"nodes": 4}, checkpoint=URL, sky={"accelerators": "H100:8"}),
        job(sky={"image": "nvcr.io/nvidia/pytorch:25.01-py3", "spot": True}, checkpoint={"store": "gs://a'b/c"}),
        script(sky={"image": "team/image"}),
    ],
)
def test_the_scripts_are_bash(recipe: Recipe) -> None:
    task = task_of(rented(recipe))
    for text in (task["setup"], task["run"]):
        command = [SHELLCHECK, "--shell=bash", "--severity=style", "-"]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}"


def test_a_plan_is_read_back() -> None:
    made = rented(job(resources={"nodes": 2}, checkpoint=URL, sky={"accelerators": "H100:8"}))
    assert Plan.from_json(made.to_json()) == made


def test_the_profile_of_the_documentation_plans_the_main_recipe(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
    path = tmp_path / "cloud.yaml"
    path.write_text(text.partition("```yaml\n")[2].partition("```")[0])
    profile = read_profile(path)
    profile.findings.raise_if_any()
    recipe = load_recipe(ROOT / "recipes" / "mnist_ddp.yaml", ["checkpoint.store=s3://bucket/runs"], profile=profile)
    made = make_plan(recipe, facts(), run_id="r0", runs_dir="runs", executor=profile.executor)
    resources = task_of(made)["resources"]
    assert (resources["accelerators"], resources["use_spot"], resources["disk_tier"]) == ("H100:8", True, "high")
    assert task_of(made)["file_mounts"]["/data"] == "s3://bucket/data"
