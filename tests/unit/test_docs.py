"""What the documents say is so: commands work, links lead somewhere, shipped recipes plan.

A fenced block that begins with ```console lists commands, each after `$ `. The word after it says how it is tested:
`run` = each command is run here (quick ones), `train` = all are run in order, with real processes, by the test below;
without a word only commands of another program may stand in it, and `make` targets have to exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.planning.facts import gather_facts
from launcher.planning.make import make_plan
from launcher.recipe.degrees import ONE_PROCESS
from launcher.recipe.loader import load_recipe
from launcher.recipe.schema import SlurmSection

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "runs") for part in path.relative_to(ROOT).parts)
)
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
OTHER_PROGRAMS = ("make", "pip", "git", "pre-commit", ".venv/bin/pytest")
TRAIN_LIMIT_S = 240


@dataclass(frozen=True)
class Command:
    """One command of a document."""

    file: str
    line: int
    text: str
    how: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def commands(path: Path) -> list[Command]:
    """The commands in the ```console blocks of a document."""
    found, how = [], None
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("```"):
            name, _, word = line[3:].partition(" ")
            how = word if how is None and name == "console" else None
        elif how is not None and line.startswith("$ "):
            found.append(Command(str(path.relative_to(ROOT)), number, line[2:], how))
    return found


COMMANDS = [command for document in DOCUMENTS for command in commands(document)]


def run(command: Command, cwd: Path, limit_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, with the `launch` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command.text],
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text("utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_commands_are_found() -> None:
    """Or every test below would pass on nothing."""
    assert {command.how for command in COMMANDS} == {"", "run", "train"}
    assert any(command.text == "make demo" for command in COMMANDS)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.how == "run"], ids=str)
def test_command_of_a_document_works(command: Command) -> None:
    done = run(command, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.how == ""], ids=str)
def test_command_that_is_not_run_is_of_another_program(command: Command) -> None:
    """`launch` commands have to be in a block that is run."""
    program, *arguments = command.text.split()
    assert program in OTHER_PROGRAMS, str(command)
    if program == "make":
        assert set(arguments) <= make_targets(), str(command)


@pytest.mark.process
@pytest.mark.parametrize("file", sorted({each.file for each in COMMANDS if each.how == "train"}))
@pytest.mark.timeout(2 * TRAIN_LIMIT_S)
def test_trainings_of_a_document_work_in_its_order(file: str, tmp_path: Path) -> None:
    """One user, one afternoon: each command finds what the ones before it have left."""
    for command in (each for each in COMMANDS if each.file == file and each.how == "train"):
        done = run(command, ROOT, TRAIN_LIMIT_S, LAUNCH_RUNS=str(tmp_path / "runs"))
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.process
@pytest.mark.timeout(2 * TRAIN_LIMIT_S)
def test_python_of_the_readme_works(tmp_path: Path) -> None:
    """The one block that starts a run, in an interpreter of its own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (example,) = (each for each in blocks if "launcher.run(" in each)
    python = Command("README.md", 0, f"python - <<'EOF'\n{example}EOF", "train")
    done = run(python, ROOT, TRAIN_LIMIT_S, LAUNCH_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_the_demo_learns_on_two_agents(tmp_path: Path) -> None:
    """The command of `make demo`, as it stands there."""
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/(launch .*)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe
    done = run(Command("Makefile", 0, recipe[1], "train"), ROOT, TRAIN_LIMIT_S, LAUNCH_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes (both on this machine: 2 agents)" in done.stdout
    (result,) = (tmp_path / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["metrics"]["eval/accuracy"] >= 0.97


def test_every_target_is_in_the_menu() -> None:
    menu = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1] for line in menu.splitlines()} == make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_recipe_plans(recipe: Path, nodes: int | None) -> None:
    """As it stands, and on two nodes if it may have many processes."""
    wanted = nodes if load_recipe(recipe).recipe.parallelism.name not in ONE_PROCESS else None
    loaded = load_recipe(recipe, (), flags={"resources.nodes": ("--nodes", wanted)})
    plan = make_plan(loaded, gather_facts(), run_id="r0", runs_dir="runs")
    assert len(plan.nodes) == (wanted or loaded.recipe.resources.nodes)


def test_readme_of_the_recipes_lists_them_all() -> None:
    text = (ROOT / "recipes/README.md").read_text("utf-8")
    listed = re.findall(r"^\| `([\w.]+\.yaml)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


def test_commands_in_the_head_of_a_recipe_plan() -> None:
    """What its first lines say that one may type, as far as this machine can plan it."""
    checked = 0
    for recipe in RECIPES:
        for line in re.findall(r"^#   launch (recipes/\S+\.yaml.*)$", recipe.read_text("utf-8"), re.MULTILINE):
            words = shlex.split(re.split(r"\s{3,}", line)[0])
            flags = {"--nodes": "resources.nodes", "--nproc-per-node": "resources.nproc_per_node"}
            given = {flags[flag]: (flag, int(value)) for flag, value in pairwise(words) if flag in flags}
            keys = [word for word in words[1:] if "=" in word]
            load_recipe(ROOT / words[0], keys, flags=given)
            checked += 1
    assert checked > 20


def test_recipe_of_the_readme_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is explained line by line."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    whole, own, script, slurm, network = blocks
    (tmp_path / "whole.yaml").write_text(whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/nets.py").write_text("def small(width: int = 32): ...\n")
    (tmp_path / "mine/sets.py").write_text("def rows(): ...\n")
    (tmp_path / "own.yaml").write_text(f"name: own\nworkdir: .\ntrain: {{until: 1 epoch}}\n{own}")
    for name, part in (("network.yaml", network), ("slurm.yaml", slurm)):
        (tmp_path / name).write_text("extends: whole.yaml\n" + part)
    for name in ("whole.yaml", "own.yaml", "network.yaml", "slurm.yaml"):
        executor = "slurm" if name == "slurm.yaml" else "local"
        make_plan(load_recipe(tmp_path / name, ()), gather_facts(), run_id="r0", runs_dir="runs", executor=executor)
    (tmp_path / "script.yaml").write_text(script)
    (tmp_path / "finetune.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "ft").symlink_to(sys.executable)
    loaded = load_recipe(tmp_path / "script.yaml", ())
    assert loaded.recipe.secrets == ("HF_TOKEN",)
    assert loaded.recipe.setup == ("module load cuda/12.6",)


def test_keys_of_a_job_are_all_told_and_plan(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "slurm/README.md").read_text("utf-8"), re.DOTALL)
    (whole, *_) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "whole.yaml").write_text(whole)
    (tmp_path / "slurm.yaml").write_text("extends: whole.yaml\n" + block)
    loaded = load_recipe(tmp_path / "slurm.yaml", ())
    told = {field.alias or name for name, field in SlurmSection.model_fields.items()}
    assert {key.split(".")[1] for key in loaded.places if key.startswith("slurm.")} == told
    plan = make_plan(loaded, gather_facts(), run_id="r0", runs_dir="runs", executor="slurm")
    assert plan.slurm is not None
    assert "--gres=gpu:a100:4" in plan.slurm.script


def test_script_of_the_recipes_readme_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "recipes/README.md").read_text("utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "script:" in block]
    python = tmp_path / "envs/ft/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/finetune.py").touch()
    (tmp_path / "recipes/lora.yaml").write_text(example)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load_recipe(tmp_path / "recipes/lora.yaml", ["resources.device=cpu"])
    assert loaded.recipe.python == str(python)
    plan = make_plan(loaded, gather_facts(), run_id="r0", runs_dir="runs")
    assert plan.worker.cwd == str(tmp_path)
    assert plan.worker.argv[:3] == ("--lr", "2e-4", "--bf16")


def test_version_is_the_same_everywhere() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert versions[0] == pyproject()["project"]["version"] == launcher.__version__


def test_every_dependency_is_pinned_within_its_range() -> None:
    """A documented install is the tested one."""
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    )
    # SkyPilot has an environment of its own in the tests: it brings a hundred packages.
    pins["skypilot"] = re.findall(r"skypilot==([\d.]+)", (ROOT / "Makefile").read_text("utf-8"))[0]
    extras = pyproject()["project"]["optional-dependencies"]
    for text in [*pyproject()["project"]["dependencies"], *(each for extra in extras.values() for each in extra)]:
        requirement = Requirement(text)
        if requirement.name == "launcher":  # one extra that brings another
            continue
        assert pins[requirement.name.lower()] in requirement.specifier, text


def test_documented_installs_are_the_tested_versions() -> None:
    installs = [each for each in COMMANDS if each.text.startswith("pip install")]
    assert installs
    assert [each for each in installs if "-c constraints.txt" not in each.text] == []


def test_the_table_of_the_training_job_names_its_modules() -> None:
    text = (ROOT / "jobs" / "README.md").read_text("utf-8")
    assert [path.name for path in (ROOT / "jobs").glob("[!_]*.py") if f"`{path.name}`" not in text] == []
    told = re.findall(r"`(\w+\.py)`", text.partition("| file |")[2].partition("\n\n")[0])
    assert [name for name in told if not (ROOT / "jobs" / name).exists()] == []


def test_every_fault_and_feature_has_a_test_that_is_there() -> None:
    """The tables in tests/README.md name tests by file and function."""
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`((?:[a-z]+/)+test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30
    missing = [name for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []
