"""Profiles: the layer below a recipe, its strictness, and where a name finds one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import shipped
from launcher.cli.recipes import check, list_, schema
from launcher.errors import RecipeError
from launcher.executors.base import EXECUTORS
from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.recipe.jsonschema import PROFILE_PATH
from launcher.recipe.loader import LoadedRecipe, load_recipe, script_recipe
from launcher.recipe.profiles import read_profile
from launcher.recipe.schema import Profile
from launcher.recipe.whereto import find_place

JOB = """\
name: demo
model: {name: mlp}
data: {name: synthetic, global_batch_size: 8}
train: {until: 2 epochs}
"""
LAB = """\
executor: slurm
description: our own
slurm:
  partition: gpu
  account: lab
  sbatch: {comment: lab, nice: 100}
resources: {nproc_per_node: 4, threads: 2}
env: {SITE: lab, BOTH: profile}
setup: [module load cuda]
runs_dir: runs
"""
ROOT = Path(__file__).parents[3]

On = Callable[..., LoadedRecipe]


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> On:
    """Load a recipe (by default a small valid job) on top of a profile in ./profiles."""
    monkeypatch.chdir(tmp_path)
    Path("profiles").mkdir()

    def _on(profile: str = LAB, *overrides: str, recipe: str = JOB) -> LoadedRecipe:
        Path("profiles/lab.yaml").write_text(profile, "utf-8")
        Path("a.yaml").write_text(recipe, "utf-8")
        return load_recipe(Path("a.yaml"), overrides, profile=find_place("lab", EXECUTORS).profile)

    return _on


def mistakes(call: Callable[[], object]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        call()
    return [f"{problem.where}: {problem.message}" for problem in caught.value.problems]


def test_a_profile_is_below_the_recipe_and_every_value_has_its_origin(on: On) -> None:
    """F028: what the site says once is not said in every recipe."""
    loaded = on(LAB, "slurm.account=mine", recipe=f"{JOB}slurm: {{partition: cpu}}\nenv: {{BOTH: recipe}}\n")
    slurm = loaded.recipe.slurm
    assert (slurm.partition, slurm.account, slurm.qos) == ("cpu", "mine", None)
    assert loaded.recipe.env == {"SITE": "lab", "BOTH": "recipe"}
    assert loaded.origin("slurm.partition") == "a.yaml:5:20"
    assert loaded.origin("slurm.account") == "override slurm.account=mine"
    assert loaded.origin("slurm.sbatch.nice") == "profile profiles/lab.yaml:6:32"
    assert loaded.origin("env.SITE") == "profile profiles/lab.yaml:8:13"
    assert loaded.origin("slurm.qos") == "default"


def test_a_profile_is_below_what_a_recipe_extends(on: On, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(f"{JOB}resources: {{threads: 3}}\n")
    loaded = on(recipe="name: a\nextends: base.yaml\n")
    assert (loaded.recipe.resources.threads, loaded.recipe.resources.nproc_per_node) == (3, 4)


def test_auto_in_a_recipe_says_nothing_and_null_takes_away(on: On) -> None:
    """F040: `null` removes what the profile says."""
    loaded = on(recipe=f"{JOB}resources: {{nproc_per_node: auto}}\nslurm: {{account: null, sbatch: {{nice: null}}}}\n")
    assert loaded.recipe.resources.nproc_per_node == 4
    assert loaded.recipe.slurm.account is None
    assert loaded.recipe.slurm.sbatch == {"comment": "lab", "nice": None}
    assert on(LAB, "resources.nproc_per_node=auto").recipe.resources.nproc_per_node == "auto"
    quoted = on("executor: local\nenv: {A: b}\n", recipe=f"{JOB}env: {{A: auto}}\n")
    assert quoted.recipe.env == {"A": "auto"}, "auto is a word of ours only where it is the default"


def test_setup_of_the_profile_comes_first_and_other_lists_are_replaced(on: On) -> None:
    """F055"""
    text = f"{LAB}secrets: [A_KEY]\nprepare: [fetch]\n"
    loaded = on(text, recipe=f"{JOB}setup: [export A=1, export B=2]\nsecrets: [B_KEY]\n")
    assert loaded.recipe.setup == ("module load cuda", "export A=1", "export B=2")
    assert loaded.recipe.prepare == ("fetch",)
    assert loaded.recipe.secrets == ("B_KEY",)
    assert loaded.origin("setup") == "profile profiles/lab.yaml:9:9, first 1 of 3; a.yaml:5:1"
    assert on(LAB, "setup=[]", recipe=f"{JOB}setup: [x]\n").recipe.setup == ()


def test_paths_are_relative_to_the_profile(on: On, tmp_path: Path) -> None:
    text = f"{LAB.replace('slurm:', 'slurm:' + chr(10) + '  template: ours.sh.j2')}"
    loaded = on(text)
    assert loaded.recipe.runs_dir == str(tmp_path / "profiles/runs")
    assert loaded.recipe.slurm.template == str(tmp_path / "profiles/ours.sh.j2")


def test_what_only_scripts_have_does_not_break_a_job_and_is_said(on: On, tmp_path: Path) -> None:
    text = """\
executor: slurm
python: python3
network: {timeout: 30m}
slurm: {container: {runtime: apptainer, image: a.sif}}
"""
    job = on(text)
    assert (job.recipe.python, job.recipe.slurm.container) == (None, None)
    assert job.recipe.network.timeout.text == "30m"
    assert [note.partition(" does not count")[0] for note in job.notes] == [
        "python of the profile (profiles/lab.yaml:2:9)",
        "slurm.container of the profile (profiles/lab.yaml:4:9)",
    ]
    (tmp_path / "train.py").touch()
    script = script_recipe(Path("train.py"), [], profile=find_place("lab", EXECUTORS).profile)
    assert script.recipe.python == "python3"  # of the image: no path of this machine
    assert script.recipe.slurm.container is not None
    assert script.recipe.network.timeout.text == "10m"
    assert script.notes == ("network.timeout of the profile (profiles/lab.yaml:3:20) does not count: a script sets the "
                            "timeout of its collectives itself",)  # fmt: skip


def test_every_mistake_of_both_files_at_once(on: On) -> None:
    text = """\
executor: slrm
slurm: {partion: gpu, time: 3, sbatch: {comment: [1]}}
model: {name: mlp}
extends: other.yaml
resources: {nodes: 3, threads: 0}
foo: 1
python: nope/python
description: [x]
env: {API_TOKEN: abcdefgh}
"""
    belongs = "belongs to a recipe; a profile says where a run goes and how things are done there"
    assert mistakes(lambda: on(text, "slurm.time=1h", "train.foo=3", recipe=f"{JOB}bar: 2\n")) == [
        "a.yaml:5:1: unknown key 'bar'",
        "profiles/lab.yaml:1:11: executor: 'slrm' is not an executor",
        "profiles/lab.yaml:2:9: unknown key 'partion' in slurm",
        "profiles/lab.yaml:2:29: slurm.time: '3' is not a duration",
        "profiles/lab.yaml:2:41: slurm.sbatch.comment: a list is not a single value or null",
        f"profiles/lab.yaml:3:1: model: {belongs}",
        f"profiles/lab.yaml:4:1: extends: {belongs}",
        "profiles/lab.yaml:5:13: resources.nodes: does not belong to a profile",
        "profiles/lab.yaml:5:32: resources.threads: 0 is not a whole number >= 1 or auto",
        "profiles/lab.yaml:6:1: unknown key 'foo'",
        "profiles/lab.yaml:7:9: python: there is no such file: " + str(Path("profiles/nope/python").absolute()),
        "profiles/lab.yaml:8:1: description: a list is not text",
        "profiles/lab.yaml:9:18: env.API_TOKEN: the value of API_TOKEN is a secret, and a recipe is kept and shown",
        "train.foo=3: unknown key 'foo' in train",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("- a\n", "is not a profile: it has no keys"),
        ("slurm: {partition: gpu}\n", "executor is missing"),
        ("executor: slurm\nexecutor: local\n", "executor"),
        ("executor: slurm\nslurm: {after: last}\n", "slurm.after: does not belong to a profile"),
        ("executor: slurm\nslurm: {mem: [1]}\n", "slurm.mem"),
        ("executor: slurm\nslurm: gpu\n", "slurm: "),
    ],
)
def test_a_file_that_is_no_profile(on: On, text: str, said: str) -> None:
    found = mistakes(lambda: on(text))
    assert len(found) == 1
    assert said in found[0]


def test_interpolation_reaches_the_environment_and_the_recipe(on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    text = """\
executor: slurm
runs_dir: /project/${oc.env:USER}/runs
slurm: {time: "${env.T}", sbatch: {comment: "${name}"}}
"""
    loaded = on(text, recipe=f"{JOB}env: {{T: 1h}}\n")
    assert loaded.recipe.runs_dir == "/project/ada/runs"
    assert loaded.recipe.slurm.sbatch == {"comment": "demo"}
    assert mistakes(lambda: on(text.replace("USER", "NOBODY_SET_THIS"), recipe=f"{JOB}env: {{T: 1h}}\n")) == [
        "profiles/lab.yaml:2:11: runs_dir: environment variable NOBODY_SET_THIS is not set"
    ]


def test_where_a_name_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    users = tmp_path / "config/launcher/profiles"
    users.mkdir(parents=True)
    assert find_place("testcluster", EXECUTORS).profile is not None
    (users / "testcluster.yaml").write_text("executor: local\n")
    (users / "mine.yaml").write_text("executor: local\n")
    place = find_place("testcluster", EXECUTORS)
    assert (place.name, place.executor, place.origin) == ("testcluster", "local", "flag --on")
    Path("profiles").mkdir()
    Path("profiles/mine.yaml").write_text("executor: slurm\n")
    assert find_place("mine", EXECUTORS).executor == "slurm"
    assert find_place(f"{users}/mine.yaml", EXECUTORS).executor == "local"
    assert find_place("profiles/mine.yaml", EXECUTORS).executor == "slurm"
    Path("profiles/local.yaml").write_text("executor: slurm\n")
    assert find_place("local", EXECUTORS).profile is None, "an executor is an executor"
    assert find_place(None, EXECUTORS).is_default
    with pytest.raises(RecipeError) as caught:
        find_place("mien", EXECUTORS)
    (problem,) = caught.value.problems
    assert problem.message.startswith("'mien' is not a place")
    assert "did you mean 'mine'?" in problem.hint
    assert "mine (in profiles)" in problem.hint
    assert "testcluster (in config/launcher/profiles)" in problem.hint
    assert ", ".join(EXECUTORS) in problem.hint
    assert "there is no such file" in mistakes(lambda: load_recipe(
        ROOT / "recipes/mnist_mlp.yaml", profile=find_place("./mien.yaml", EXECUTORS).profile))[0]  # fmt: skip


def test_the_default_place_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = tmp_path / "launcher/config.yaml"
    settings.parent.mkdir()
    settings.write_text("# where I work\non: testcluster\n")
    place = find_place(None, EXECUTORS)
    assert (place.name, place.executor, place.origin) == ("testcluster", "slurm", f"{settings}:2:5")
    assert find_place("local", EXECUTORS).origin == "flag --on"
    (settings.parent / "mine.yaml").write_text("executor: local\n")
    settings.write_text("on: ./mine.yaml\n")
    assert find_place(None, EXECUTORS).executor == "local", "a path is relative to the file that it is written in"
    settings.write_text("on: testclustr\n")
    assert mistakes(lambda: find_place(None, EXECUTORS))[0].startswith(f"{settings}:1:5: 'testclustr' is not a place")
    settings.write_text("un: slurm\non: [slurm]\n")
    assert mistakes(lambda: find_place(None, EXECUTORS)) == [
        f"{settings}:1:1: unknown key 'un'",
        f"{settings}:2:1: on: a list is not the name of a place",
    ]


SHIPPED = sorted(shipped.PROFILES.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", ["mnist_ddp", "script_ddp"])
def test_every_shipped_profile_plans_what_it_says(path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    profile = read_profile(path)
    assert not profile.findings
    assert profile.description
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    loaded = load_recipe(ROOT / f"recipes/{recipe}.yaml", flags={"resources.nodes": ("--nodes", 2)}, profile=profile)
    facts = gather_facts(python=loaded.recipe.python, secrets=loaded.recipe.secrets)
    plan = make_plan(loaded, facts, run_id="r", runs_dir="/runs", executor=profile.executor)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.slurm is not None
    flags = {flag.flag: (flag.value, flag.key) for flag in plan.slurm.flags}
    for key in ("partition", "account", "qos", "gres", "mem"):
        value = getattr(loaded.recipe.slurm, key)
        assert (f"--{key}" in flags) == (value is not None), "only what somebody said is sent"
        if value is not None:
            assert flags[f"--{key}"] == (value, f"slurm.{key}")


def test_the_shipped_profiles_are_of_different_sites() -> None:
    keys = {path.stem: set(read_profile(path).tree.entries["slurm"].value.entries) for path in SHIPPED}  # type: ignore[union-attr]
    assert "gres" in keys["university"]
    assert {"account", "qos", "gpus_per_node", "container"} <= keys["centre"]
    assert "container" in keys["industry"]
    assert "testcluster" in keys


def test_files_of_slurm_are_in_an_installation_too() -> None:
    """They are links here, and a wheel has what they lead to: `package-data`, and no package of its own."""
    assert shipped.PROFILES.resolve() == ROOT / "slurm/profiles"
    assert shipped.BATCH_TEMPLATE.resolve() == ROOT / "slurm/batch.sh.j2"
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"shipped/profiles/*", "shipped/batch.sh.j2"} <= set(tool["package-data"]["launcher"])
    assert "launcher.shipped.*" in tool["packages"]["find"]["exclude"]


def test_the_schema_of_a_profile_has_its_keys_and_no_other() -> None:
    said = CliRunner().invoke(schema, ["--profile"])
    assert said.output == PROFILE_PATH.read_text("utf-8")
    document = json.loads(said.output)
    assert list(document["properties"]) == list(Profile.model_fields)
    assert document["required"] == ["executor"]
    assert "nodes" not in document["$defs"]["ResourcesSection"]["properties"]


def test_check_and_list_show_profiles(on: On) -> None:
    on()
    said = CliRunner().invoke(check, ["a.yaml", "--on", "lab"])
    assert (said.exit_code, said.output) == (0, "ok  a.yaml on lab\n")
    Path("profiles/lab.yaml").write_text("executor: slurm\nslurm: {tim: 1h}\n")
    said = CliRunner().invoke(check, ["a.yaml", "--on", "lab"])
    assert said.exit_code == 2
    assert "profiles/lab.yaml:2:9: unknown key 'tim' in slurm" in said.stderr
    said = CliRunner().invoke(list_, ["profiles"])
    assert "lab" in said.output
    assert "has mistakes: launch check RECIPE --on lab" in said.output
    assert "slurm  " in said.output
    rows = json.loads(CliRunner().invoke(list_, ["profiles", "--json"]).output)
    assert rows["testcluster"]["executor"] == "slurm"
    assert CliRunner().invoke(list_, ["executors"]).output.split() == list(EXECUTORS)
