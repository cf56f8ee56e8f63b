"""What ships: recipes, schema.json, and the commands that show them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.recipes import KINDS, check, list_, schema
from launcher.recipe.catalog import SOURCES, catalog
from launcher.recipe.explain import field_docs
from launcher.recipe.hints import COMMON_NAMES, WITHOUT_KEY, key_paths
from launcher.recipe.jsonschema import PATH, PROFILE_PATH, make_profile_schema, make_schema, to_text
from launcher.recipe.loader import load_recipe
from launcher.recipe.reference import PATH as REFERENCE
from launcher.recipe.reference import make_reference
from launcher.recipe.schema import Recipe

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_ships_is_right(path: Path) -> None:
    loaded = load_recipe(path)
    assert loaded.text.startswith("# yaml-language-server: $schema=../launcher/recipe/schema.json\n")


def test_the_first_recipe_is_the_one_of_the_readme() -> None:
    recipe = load_recipe(ROOT / "recipes/mnist_ddp.yaml").recipe
    assert (recipe.name, recipe.model.name, recipe.data.name) == ("mnist-ddp", "convnet", "mnist")
    assert (recipe.data.global_batch_size, recipe.train.until.text) == (128, "8 epochs")
    assert recipe.train.optimizer.options == {"lr": 2e-3}
    assert (recipe.checkpoint.best, recipe.resources.threads) == ("eval/accuracy max", 1)


def test_schema_json_is_current() -> None:
    assert PATH.read_text("utf-8") == to_text(make_schema()), "stale: python -m launcher.recipe.jsonschema"
    assert PROFILE_PATH.read_text("utf-8") == to_text(make_profile_schema()), "stale, as above"


def test_reference_is_current_and_has_every_key() -> None:
    text = REFERENCE.read_text("utf-8")
    assert text == make_reference(), "stale: make schema"
    for path in key_paths():
        section, _, key = path.rpartition(".")
        heading = f"## {section}\n" if section else "## Top level\n"
        assert f"\n| `{key}` |" in text.partition(heading)[2].partition("\n## ")[0], path
    for kind in SOURCES:
        assert all(f": {name}`**" in text for name in catalog(kind))


def test_schema_json_knows_names_options_and_docs() -> None:
    parts = json.loads(PATH.read_text("utf-8"))["$defs"]
    assert {"convnet", "mlp"} <= set(parts["ModelSection"]["properties"]["name"]["enum"])
    mlp = next(part["then"] for part in parts["ModelSection"]["allOf"] if "mlp" in str(part["if"]))
    assert mlp["properties"]["hidden"]["type"] == "integer"
    assert parts["TrainSection"]["properties"]["until"]["description"].startswith("The total length")
    assert parts["CheckpointSection"]["properties"]["every"]["default"] == "1 epoch"


def test_documentation_of_fields_is_read_from_the_schema() -> None:
    assert field_docs(Recipe)["workdir"].startswith("Where the workers run, relative to this recipe.")


def test_words_of_other_tools_lead_to_keys_that_exist() -> None:
    options = {f"train.optimizer.{name}" for name in ("lr", "weight_decay", "momentum")}
    assert set(COMMON_NAMES.values()) <= {*key_paths(), *options}
    assert not (set(COMMON_NAMES) | set(WITHOUT_KEY)) & set(key_paths())


def test_check_lists_recipes_and_their_mistakes() -> None:
    path = "recipes/mnist_ddp.yaml"
    runner = CliRunner()
    good = runner.invoke(check, [str(ROOT / path), "train.seed=3"])
    assert (good.exit_code, good.output) == (0, f"ok  {ROOT / path}\n")
    bad = runner.invoke(check, [str(RECIPES[0]), str(ROOT / "nowhere.yaml"), "train.sed=3"])
    assert bad.exit_code == 2
    assert "train.sed=3: unknown key 'sed' in train\n    hint: did you mean 'seed'?" in bad.stderr
    assert "nowhere.yaml: there is no such file" in bad.stderr
    assert runner.invoke(check, ["a.b=3"]).exit_code == 2


def test_check_counts_workers_and_devices_as_launch_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever depends on this machine alone is a remark: a recipe says what is trained, never where."""
    monkeypatch.setattr("launcher.planning.facts._gpus", lambda visible: ((), ""))
    path, runner = str(ROOT / "recipes/mnist_ddp.yaml"), CliRunner()
    for key, message in {
        "parallelism.dp=3": "parallelism: dp 3, but the world size is 1 (nodes 1 x nproc_per_node 1, auto: one on CPU)",
        "parallelism.sync_batchnorm=true": "parallelism.sync_batchnorm: true, and the device is cpu",
        "data.global_batch_size=127": "",
        "resources={nodes: 2, nproc_per_node: 3}": "data.global_batch_size: 128 does not divide by 6",
        "profiler={steps: 9-2}": "profiler.steps: 9-2 ends at 2",
    }.items():
        done = runner.invoke(check, [path, key])
        assert (done.exit_code, done.stdout) == ((2, "") if message else (0, f"ok  {path}\n")), done.output
        assert message in done.stderr
    bad = runner.invoke(check, [path, "resources.nproc_per_node=2", "parallelism={strategy: split}"])
    assert "parallelism.strategy: split is one process" in bad.stderr
    there = runner.invoke(check, [path, "resources.device=cuda", "parallelism.tp=2"])
    assert there.exit_code == 0
    assert (
        "- it would not start here: resources.device: cuda was asked for, but this machine has no GPU" in there.output
    )
    assert "where those are known (--on), degrees and batch are checked" in there.output
    swept = runner.invoke(check, [path, "sweep={grid: {train.accumulate: [1, 3, 5]}}"])
    assert swept.exit_code == 2
    assert swept.stderr.count("does not divide by") == 2


def test_schema_prints_the_file() -> None:
    assert CliRunner().invoke(schema, []).output == PATH.read_text("utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_list_shows_every_kind(kind: str) -> None:
    shown = CliRunner().invoke(list_, [kind])
    assert shown.exit_code == 0
    entries = json.loads(CliRunner().invoke(list_, [kind, "--json"]).output)
    assert entries
    for name, entry in entries.items():
        assert f"{name}  {entry['description']}" in shown.output
        assert all(f"    {option['name']}: {option['type']}" in shown.output for option in entry["options"])


def test_list_knows_the_kinds_of_the_catalog() -> None:
    assert set(KINDS) == set(SOURCES)
    assert CliRunner().invoke(list_, ["colours"]).exit_code == 2


def test_loading_a_recipe_imports_neither_torch_nor_omegaconf() -> None:
    code = (
        "import sys; from pathlib import Path; from launcher.recipe.loader import load_recipe;"
        "load_recipe(Path('recipes/mnist_ddp.yaml'));"
        "print(sorted({'torch', 'numpy', 'omegaconf', 'jobs', 'wandb', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
