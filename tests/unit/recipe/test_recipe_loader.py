"""Who set what: precedence, origins, places, relative paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import Problem, RecipeError
from launcher.recipe.dump import dump_yaml
from launcher.recipe.loader import LoadedRecipe, load_recipe, script_recipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]

BASE = """\
name: base
model: {name: mlp, hidden: 64}
data: {name: synthetic, global_batch_size: 8}
train:
  until: 2 epochs
  seed: 1
  accumulate: 2
resources: {nodes: 1, threads: 1}
"""


def test_each_layer_beats_the_one_below(load: Load, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    loaded = load(
        "train.accumulate=4",
        "resources.nodes=3",
        text="extends: base.yaml\nname: child\ntrain: {seed: 2, accumulate: 3}\nresources: {nodes: 2}\n",
        flags={"resources.nodes": ("--nodes", 4), "name": ("--name", None)},
    )
    recipe = loaded.recipe
    assert (recipe.name, recipe.train.until.text, recipe.train.seed) == ("child", "2 epochs", 2)
    assert (recipe.train.accumulate, recipe.resources.nodes, recipe.resources.threads) == (4, 4, 1)
    assert loaded.origins == {
        "extends": "a.yaml:1:10",
        "name": "a.yaml:2:7",
        "model.name": "extends base.yaml:2:15",
        "model.hidden": "extends base.yaml:2:28",
        "data.name": "extends base.yaml:3:14",
        "data.global_batch_size": "extends base.yaml:3:44",
        "train.until": "extends base.yaml:5:10",
        "train.seed": "a.yaml:3:15",
        "train.accumulate": "override train.accumulate=4",
        "resources.nodes": "flag --nodes",
        "resources.threads": "extends base.yaml:8:32",
    }
    assert loaded.origin("resources.nodes") == "flag --nodes"
    assert loaded.origin("faults.max_restarts") == "default"


def test_where_finds_the_nearest_place(load: Load) -> None:
    loaded = load("checkpoint.keep=5", more="resources:\n  nodes: 2\n")
    assert loaded.where("resources.nodes") == "a.yaml:7:10"
    assert loaded.where("resources.threads") == "a.yaml:6:1"
    assert loaded.where("checkpoint.keep") == "checkpoint.keep=5"
    assert loaded.where("network.interface") == "a.yaml:1:1"


def test_mistakes_of_the_extended_recipe_are_shown_there(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE.replace("seed: 1", "sed: 1"))
    problems = fail(text="extends: base.yaml\nname: a b\n")
    assert [(p.where, p.message) for p in problems] == [
        ("a.yaml:2:7", "name: 'a b' does not fit"),
        ("base.yaml:6:3", "unknown key 'sed' in train"),
    ]


def test_extends_has_one_level(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: other.yaml\n" + BASE)
    (problem,) = fail(text="extends: base.yaml\nname: a\n")
    assert (problem.where, problem.hint) == ("base.yaml:1:1", "one level only")


def test_extended_recipe_that_is_not_there(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").touch()
    (problem,) = fail(text="extends: bases.yaml\nname: a\n")
    assert problem.where == "a.yaml:1:10"
    assert problem.hint == "did you mean 'base.yaml'?"


def test_paths_are_relative_to_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("recipes", "bases", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").touch()
    (tmp_path / "bases/b.yaml").write_text("script: train.py\nworkdir: ..\n")
    (tmp_path / "recipes/a.yaml").write_text("extends: ../bases/b.yaml\nname: a\nruns_dir: runs\n")
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(Path("../recipes/a.yaml")).recipe
    assert recipe.script == str(tmp_path / "bases/train.py")
    assert recipe.workdir == str(tmp_path)
    assert recipe.runs_dir == str(tmp_path / "recipes/runs")
    assert load_recipe(Path("../recipes/a.yaml"), ["script=train.py"]).recipe.script == str(tmp_path / "here/train.py")


def test_weights_to_start_from_are_a_run_or_a_path(load: Load, tmp_path: Path) -> None:
    assert load("checkpoint.init_from=demo-1130-k7qz").recipe.checkpoint.init_from == "demo-1130-k7qz"
    assert load("checkpoint.init_from=ck/step-3").recipe.checkpoint.init_from == str(tmp_path / "ck/step-3")


def test_places_are_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    assert load_recipe(tmp_path / "deep/a.yaml").where("name") == "deep/a.yaml:1:7"
    monkeypatch.chdir(tmp_path / "deep")
    assert load_recipe(tmp_path / "deep/a.yaml").where("name") == "a.yaml:1:7"
    assert load_recipe(Path("a.yaml")).source == tmp_path / "deep/a.yaml"


def test_anchors_repeat_a_part(load: Load) -> None:
    loaded = load(more="extra: {common: &c {A: x}}\nenv: *c\n")
    assert loaded.recipe.env == {"A": "x"}


def test_overrides_make_the_sections_they_need(load: Load) -> None:
    recipe = load("tracking.wandb.project=p", "network.nccl.DEBUG=INFO", "train.schedule.warmup=30 steps").recipe
    assert recipe.tracking.wandb.project == "p"
    assert recipe.network.nccl == {"DEBUG": "INFO"}
    assert recipe.train.schedule.warmup.steps(1) == 30


def test_the_last_override_of_a_key_wins(load: Load) -> None:
    loaded = load("train.seed=1", "train.seed=2")
    assert loaded.recipe.train.seed == 2
    assert loaded.overrides == ("train.seed=1", "train.seed=2")


IMAGES = BASE.replace("name: synthetic", "name: synthetic, shape: 1x28x28")


def test_an_override_with_a_section_replaces_it(load: Load) -> None:
    recipe = load("model={name: convnet}", text=IMAGES).recipe
    assert recipe.model.name == "convnet"
    assert recipe.model.options == {}


def test_options_of_another_model_are_not_dropped_silently(fail: Fail) -> None:
    (problem,) = fail("model.name=convnet", text=IMAGES.replace("hidden: 64", "layers: 3"))
    assert (problem.where, problem.message) == ("a.yaml:2:20", "model.layers: `convnet` has no such option")
    assert problem.hint == (
        "`model.name=convnet` keeps the options that are there; 'model={name: convnet}' replaces them all"
    )
    (problem,) = fail("model.name=convnet", "model.bogus=1", text=IMAGES.replace(", hidden: 64", ""))
    assert problem.hint.startswith("`convnet` has "), "it came with the new name"


def test_script_without_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my train-1.py").touch()
    args = ["--lr", "1e-3", "", "a b", "${x}", "a\\${b}", "null", "*", "--x={'a': [1]}", "ä\n"]
    loaded = script_recipe(Path("my train-1.py"), args, ["env.A=${name}"], flags={"resources.nodes": ("--nodes", 2)})
    recipe = loaded.recipe
    assert recipe.args == tuple(args)
    assert (recipe.name, recipe.script) == ("my-train-1", str(tmp_path / "my train-1.py"))
    assert recipe.env == {"A": "my-train-1"}
    assert recipe.resources.nodes == 2
    assert loaded.source is None
    Path("again.yaml").write_text(loaded.text)
    assert load_recipe(Path("again.yaml")).recipe.args == tuple(args)


@pytest.mark.parametrize(("stem", "name"), [("_x_", "x"), ("...", "script"), ("é", "script"), ("a" * 60, "a" * 41)])
def test_names_of_scripts_are_made_safe(tmp_path: Path, stem: str, name: str) -> None:
    script = tmp_path / f"{stem}.py"
    script.touch()
    assert script_recipe(script, []).recipe.name == name


def test_script_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        script_recipe(Path("train.py"), [], ["trian=1"])
    assert [p.where for p in caught.value.problems] == ["train.py", "trian=1"]


def test_the_record_of_a_run_loads_to_the_same_recipe(load: Load, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    for text in (BASE, "name: s\nscript: t.py\nargs: ['${oc.env:HOME,x}', '1e3', 'no', 'null']\nextra: {a: '1e3'}\n"):
        recipe = load(text=text).recipe
        record = dump_yaml(recipe.model_dump(mode="json", by_alias=True))
        assert load(text=record).recipe == recipe


MISFITS = {
    "mnist": (
        ("model.classes=5", "model.classes=5: model.classes: 5, and the data has 10 classes; make it 10"),
        (
            "model={name: resnet18}",
            "model={name: resnet18}: model.in_channels: 3, and a sample of the data is 1 x 28 x 28; make it 1",
        ),
        (
            "data={name: image_folder, root: ., size: 64, global_batch_size: 8}",
            "a.yaml:2:15: model.in_features: 784, and a sample of the data is 3 x 64 x 64; make it 12288",
        ),
        (
            "model={name: gpt}",
            "model={name: gpt}: model.vocabulary: 256: it reads tokens, and a sample of the data is 1 x 28 x 28 "
            "numbers",
        ),
    ),
    "text, path: stdlib": (
        (
            "model.hidden=8",
            "a.yaml:2:15: model: it takes numbers, and a sample of the data is 128 tokens; gpt and lstm read them",
        ),
        (
            "model={name: gpt, context: 64}",
            "model={name: gpt, context: 64}: model.context: 64 tokens, and the data has sequences of 128",
        ),
    ),
}


@pytest.mark.parametrize(
    ("data", "override", "line"), [(data, *case) for data, cases in MISFITS.items() for case in cases]
)
def test_a_model_for_other_samples_than_the_data_has_is_found_here(
    fail: Fail, data: str, override: str, line: str
) -> None:
    """Not after hours in a queue: what a data set of ours holds stands in its file."""
    text = BASE.replace("name: synthetic", f"name: {data}").replace(", hidden: 64", "")
    (problem, *_) = fail(override, text=text)
    assert f"{problem.where}: {problem.message}" == line


def test_of_a_task_of_its_own_and_of_data_that_does_not_say_it_nothing_is_said(load: Load) -> None:
    load("data.kind=regression", "model.classes=3", text=BASE)
    load("data={name: image_folder, root: ., size: 64, global_batch_size: 8}", "model={name: resnet18}", text=BASE)
