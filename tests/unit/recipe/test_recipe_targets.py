"""`target: package.module:function`: the user's own function is read, never imported, and its options are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import Problem, RecipeError
from launcher.recipe.loader import LoadedRecipe, load_recipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]

NETS = '''
"""Importing this would fail: it is read alone."""
import torch_of_another_world
from elsewhere import borrowed

made = borrowed(3)


def small(width: int, *, depth: int = 2, bias: bool = True, lr=None):
    """A small one.

    Args:
        width: Numbers in each layer.
    """


def anything(**options):
    pass


class Net:
    def __init__(self, width: int = 3) -> None:
        pass

    @classmethod
    def wide(cls): ...


@torch_of_another_world.decorate
def decorated(): ...


@model("ours")
def ours(*, width: int = 3): ...
'''

BEGIN = "name: demo\ndata: {name: synthetic, global_batch_size: 8}\ntrain: {until: 2 epochs}\n"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # there modules are looked for, too
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("1/0")
    (tmp_path / "mine" / "nets.py").write_text(NETS)
    (tmp_path / "mine" / "broken.py").write_text("def f(:\n")
    return tmp_path


def test_options_are_those_of_the_function_with_its_types(mine: Path, load: Load) -> None:
    model = load(text=BEGIN + "model: {target: mine.nets:small, width: 1_000, bias: false, lr: 1e-3}\n").recipe.model
    assert model is not None
    assert (model.name, model.target) == ("target", "mine.nets:small")
    assert model.options == {"width": 1000, "bias": False, "lr": 1e-3}


def test_the_record_of_a_run_with_a_target_loads_again(mine: Path, load: Load) -> None:
    text = BEGIN + "model: {name: target, target: mine.nets:small, width: 3}\n"
    assert load(text=text).recipe == load(text=text.replace("name: target, ", "")).recipe


@pytest.mark.parametrize(
    ("model", "where", "said"),
    [
        (
            "{target: mine.nets:small, widht: 3, width: 3}",
            "4:34",
            ("model.widht: `small` has no such option", "'width'"),
        ),
        ("{target: mine.nets:small}", "4:1", ("model.width is missing; `small` needs it", "Numbers in each layer.")),
        ("{target: mine.nets:small, width: wide}", "4:41", ("model.width: 'wide' is not a whole number", "Numbers in")),
        ("{target: mine.nets:Net, depth: 3}", "4:32", ("model.depth: `Net` has no such option", "(width)")),
        (
            "{target: mine.nets:smal}",
            "4:17",
            ("model.target: there is no smal in {here}/mine/nets.py", "mean 'small'?"),
        ),
        (
            "{target: mine.net:small}",
            "4:17",
            ("model.target: there is no module mine.net in {here}/mine", "mean 'nets'?"),
        ),
        ("{target: yours:small}", "4:17", ("model.target: there is no module yours in {here}, and none is", "workdir")),
        ("{target: mine.nets.deep:small}", "4:17", ("model.target: mine.nets ({here}/mine/nets.py) is a file", "")),
        ("{target: mine.broken:f}", "4:17", ("model.target: {here}/mine/broken.py:1 is no Python: ", "")),
        ("{target: mine.nets.small}", "4:17", ("model.target: 'mine.nets.small' is not `package.module:function`", "")),
        ("{target: /x/nets.py}", "4:17", ("model.target: '/x/nets.py' is not `package.module:function`", "")),
    ],
)
def test_what_cannot_be_called_is_said(mine: Path, fail: Fail, model: str, where: str, said: tuple[str, str]) -> None:
    (problem,) = fail(text=f"{BEGIN}model: {model}\n")
    assert problem.where == f"a.yaml:{where}"
    assert problem.message.startswith(said[0].replace("{here}", str(mine)))
    assert said[1] in problem.hint


@pytest.mark.parametrize("name", ["anything", "made", "borrowed", "Net.wide", "decorated"])
def test_what_the_source_does_not_say_is_left_to_the_worker(mine: Path, load: Load, name: str) -> None:
    model = load(text=f"{BEGIN}model: {{target: 'mine.nets:{name}', x: 1, y: two}}\n").recipe.model
    assert model is not None
    assert model.options == {"x": 1, "y": "two"}


def test_it_is_looked_for_where_the_run_works(mine: Path, load: Load, fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "own_nets.py").write_text("def f(*, a: int = 1): ...\n")
    text = BEGIN + "model: {target: own_nets:f, a: 2}\n"
    assert len(fail(text=text)) == 1
    for more in ("workdir: lib\n", "env: {PYTHONPATH: lib}\n", "setup: [export PYTHONPATH=lib]\n"):
        assert load(text=text + more).recipe.model is not None
    assert len(fail(text=text.replace("a: 2", "b: 2") + "workdir: lib\n")) == 1


def test_a_module_beside_the_recipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own_nets.py").write_text("def f(): ...\n")
    recipe = tmp_path / "sub" / "r.yaml"
    recipe.write_text(BEGIN + "model: {target: own_nets:f}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe)
    (problem,) = refused.value.problems
    assert problem.hint == f"there is one in {tmp_path}/sub, where the recipe is: write `workdir: .` in it"
    recipe.write_text(BEGIN + "model: {target: own_nets:f}\nworkdir: .\n")
    assert load_recipe(recipe).recipe.model is not None


def test_a_dataset_of_the_user_s_own_is_checked_alike(mine: Path, load: Load, fail: Fail) -> None:
    (mine / "mine" / "sets.py").write_text("def rows(*, path: str): ...\n")
    text = (
        "name: demo\nmodel: {name: mlp}\ntrain: {until: 2 epochs}\ndata: {target: mine.sets:rows, global_batch_size: 8"
    )
    data = load(text=text + ", path: 1e3, loader_workers: 2}\n").recipe.data
    assert data is not None
    assert (data.options, data.loader_workers) == ({"path": "1e3"}, 2)
    (problem,) = fail(text=text + ", path: x, pth: y}\n")
    assert problem.message == "data.pth: `rows` has no such option"
