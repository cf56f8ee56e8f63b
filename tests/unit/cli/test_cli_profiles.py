"""`--on PROFILE` on an executor where nothing runs: launch, resume and rerun elsewhere, the user's default place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import STARTS, Ends, FakeExecutor

from launcher.planning.plan import Plan

Launch = Callable[..., Any]
Place = type[FakeExecutor]

ONE = """\
executor: local
env: {SITE: one, ONLY_ONE: "1", BOTH: profile}
resources: {threads: 2}
limits: {wall: 10h}
slurm: {time: 1h, container: {runtime: pyxis, image: one.sqsh}}
setup: [export A=one]
runs_dir: ../runs-of-one
"""
TWO = """\
executor: local
env: {SITE: two}
setup: [export A=two, export B=two]
faults: {grace: 7s}
"""
RECIPE = """\
name: demo
script: train.py
resume: self
env: {BOTH: recipe}
setup: [export C=recipe]
"""


@pytest.fixture(autouse=True)
def _files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("profiles").mkdir()
    Path("profiles/one.yaml").write_text(ONE)
    Path("profiles/two.yaml").write_text(TWO)
    Path("demo.yaml").write_text(RECIPE)
    monkeypatch.setattr(place, "script", (*STARTS, Ends("CANCELLED", "cancelled", 75)))


def values(plan: Plan) -> dict[str, tuple[Any, str]]:
    return {value.key: (value.value, value.origin) for value in plan.values if value.origin != "default"}


def setup(plan: Plan) -> list[str]:
    return [line.removeprefix("export ") for line in plan.setup]


def test_values_of_a_profile_are_in_the_plan_and_stay_in_a_resume(launch: Launch, place: Place) -> None:
    folder = Path.cwd()
    assert launch("demo.yaml", "env.MINE=x", "--on", "one").code == 75
    (plan,) = place.plans
    assert plan.executor == "local"
    assert Path(plan.run_dir).parent == folder / "runs-of-one"
    first = values(plan)
    assert first["on"] == ("one", "flag --on")
    assert first["env.SITE"] == ("one", "profile profiles/one.yaml:2:13")
    assert first["env.BOTH"][0] == "recipe"
    assert first["setup"][1] == "profile profiles/one.yaml:6:9, first 1 of 2; demo.yaml:5:1"
    assert setup(plan) == ["A=one", "C=recipe"]

    Path("profiles/one.yaml").write_text("broken: [")
    assert launch("resume", "last").code == 75
    again = values(place.plans[-1])
    assert again["env.SITE"] == first["env.SITE"], "what was understood once is what counts"
    assert again["env.MINE"] == ("x", "earlier override env.MINE=x")
    assert again["on"] == ("one", "earlier flag --on")
    assert again["setup"] == first["setup"]
    assert setup(place.plans[-1]) == setup(plan)


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_in_another_place_the_values_of_the_other_profile_count(launch: Launch, place: Place, verb: str) -> None:
    assert launch("demo.yaml", "env.MINE=x", "--on", "one").code == 75
    assert launch(verb, "last", "--on", "two").code == 75
    two = values(place.plans[-1])
    assert two["on"] == ("two", "flag --on")
    assert two["env.SITE"] == ("two", "profile profiles/two.yaml:2:13")
    assert "env.ONLY_ONE" not in two
    assert (two["env.BOTH"][0], two["env.MINE"][0]) == ("recipe", "x")
    assert [key for key in two if key.startswith(("limits.", "slurm."))] == []
    assert "resources.threads" not in two or two["resources.threads"][1].startswith("auto")
    assert two["faults.grace"] == ("7s", "profile profiles/two.yaml:4:17")
    assert setup(place.plans[-1]) == ["A=two", "B=two", "C=recipe"]
    assert two["setup"][1] == "profile profiles/two.yaml:3:9, first 2 of 3; demo.yaml:5:1"

    assert launch(verb, "last", "--on", "local", "env.LATE=y").code == 75
    bare = values(place.plans[-1])
    assert setup(place.plans[-1]) == ["C=recipe"]
    assert bare["setup"][1] == "demo.yaml:5:1"
    assert bare["on"] == ("local", "flag --on")
    assert not [origin for _, origin in bare.values() if "profile" in origin]
    assert {key for key in bare if key.startswith("env.")} == {"env.BOTH", "env.MINE", "env.LATE"}

    assert launch(verb, "last", "--on", "one").code == 75
    assert values(place.plans[-1])["env.ONLY_ONE"] == ("1", "profile profiles/one.yaml:2:28")


def test_mistakes_of_the_profile_come_with_those_of_the_recipe(launch: Launch, place: Place) -> None:
    Path("profiles/one.yaml").write_text("executor: moon\nslurm: {tim: 1h}\n")
    said = launch("demo.yaml", "train=3", "--on", "one")
    assert said.code == 2
    assert "profiles/one.yaml:1:11: executor: 'moon' is not an executor" in said.err
    assert "profiles/one.yaml:2:9: unknown key 'tim' in slurm" in said.err
    assert "train=3: train" in said.err
    assert place.plans == []
    assert not Path("runs").exists()


def test_the_default_place_is_shown_with_where_it_is_said(
    launch: Launch, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("launcher.planning.facts._slurm_configured", lambda: True)
    assert launch("demo.yaml").code == 3, "where SLURM is, where to run is said"
    settings = tmp_path / "launcher/config.yaml"
    settings.parent.mkdir()
    settings.write_text("on: two\n")
    said = launch("demo.yaml", "--dry-run")
    assert said.code == 0, said.err
    row = next(line.split() for line in said.out.splitlines() if line.split()[:1] == ["on"])
    assert row == ["on", "two", f"{settings}:1:5"]
    assert launch("demo.yaml", "--on", "local").code == 75
    assert values(place.plans[-1])["on"] == ("local", "flag --on")
