"""Points of a sweep: which there are, in which order, and what is wrong with them, at its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import Problem
from launcher.recipe.loader import LoadedRecipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]

BASE = """\
name: base
model: {name: mlp, hidden: 64}
data: {name: synthetic, global_batch_size: 8}
train: {until: 2 epochs, seed: 1}
"""


def overrides(loaded: LoadedRecipe) -> list[tuple[str, ...]]:
    return [point.overrides for point in loaded.points]


def flags(*texts: str) -> dict[str, tuple[str, object]]:
    return {"sweep": ("--sweep", texts)}


def test_a_grid_is_every_combination_the_last_key_first(load: Load) -> None:
    loaded = load(text=BASE + "sweep:\n  grid:\n    train.optimizer.lr: [1e-3, 1e-2]\n    model.hidden: [64, 128]\n")
    assert overrides(loaded) == [
        ("train.optimizer.lr=1e-3", "model.hidden=64"),
        ("train.optimizer.lr=1e-3", "model.hidden=128"),
        ("train.optimizer.lr=1e-2", "model.hidden=64"),
        ("train.optimizer.lr=1e-2", "model.hidden=128"),
    ]
    last = loaded.points[3]
    assert (last.index, last.recipe.sweep) == (3, None)
    assert last.recipe.train is not None
    assert last.recipe.train.optimizer.options == {"lr": 1e-2}
    assert last.recipe.model is not None
    assert last.recipe.model.options == {"hidden": 128}
    assert last.origins == {"train.optimizer.lr": "sweep a.yaml:7:32", "model.hidden": "sweep a.yaml:8:24"}
    assert loaded.recipe.sweep is not None


def test_zip_goes_side_by_side_and_a_list_is_its_points(load: Load) -> None:
    pairs = "zip: {train.seed: [1, 2], model.hidden: [8, 16]}"
    more = f"sweep:\n  {pairs}\n  list: [{{train.accumulate: 1}}, {{train.accumulate: 2}}]\n"
    assert overrides(load(text=BASE + more)) == [
        ("train.seed=1", "model.hidden=8", "train.accumulate=1"),
        ("train.seed=1", "model.hidden=8", "train.accumulate=2"),
        ("train.seed=2", "model.hidden=16", "train.accumulate=1"),
        ("train.seed=2", "model.hidden=16", "train.accumulate=2"),
    ]


def test_flags_make_a_grid_and_win_over_the_recipe(load: Load) -> None:
    written = BASE + "sweep: {grid: {train.seed: [1, 2, 3], model.hidden: [8]}, metric: eval/loss min}\n"
    loaded = load(text=written, flags=flags("train.seed=7,8", "tracking.wandb.tags=[a,b],[c]"))
    assert overrides(loaded) == [
        ("train.seed=7", "model.hidden=8", "tracking.wandb.tags=[a, b]"),
        ("train.seed=7", "model.hidden=8", "tracking.wandb.tags=[c]"),
        ("train.seed=8", "model.hidden=8", "tracking.wandb.tags=[a, b]"),
        ("train.seed=8", "model.hidden=8", "tracking.wandb.tags=[c]"),
    ]
    assert loaded.points[0].recipe.tracking.wandb.tags == ("a", "b")
    assert loaded.points[0].origins["train.seed"] == "sweep --sweep train.seed=7,8"


def test_commas_in_quotes_belong_to_the_value(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    text = "name: base\nscript: a.py\nargs: {word: x, n: 1}\n"
    loaded = load(text=text, flags=flags("""args.word="a, b",don't,'1'""", "args.n=2"))
    assert overrides(loaded) == [
        ('args.word="a, b"', "args.n=2"),
        ("args.word=don't", "args.n=2"),
        ('args.word="1"', "args.n=2"),
    ]


def test_overrides_of_a_point_read_back_to_the_same_recipe(load: Load) -> None:
    text = BASE + "sweep: {grid: {model.name: [mlp], model.hidden: [8, 16], checkpoint.every: [3 steps, null]}}\n"
    for point in load(text=text).points:
        assert load(*point.overrides, text=BASE).recipe == point.recipe


def test_a_point_may_refer_to_another_key(load: Load) -> None:
    text = BASE.replace("seed: 1", "seed: '${model.hidden}'") + "sweep: {grid: {model.hidden: [8, 16]}}\n"
    seeds = [point.recipe.train.seed for point in load(text=text).points if point.recipe.train is not None]
    assert seeds == [8, 16]


def test_mistakes_of_all_points_are_found_at_once_at_their_places(fail: Fail) -> None:
    written = (
        "train: {untill: 1}\n"
        "sweep:\n"
        "  grid:\n"
        "    train.optimizer.lr: [1e-3, fast]\n"
        "    train.optimzer.lr: [1]\n"
        "    model.hidden: [8, 0.5]\n"
    )
    problems = fail(text=BASE.replace("train: {until: 2 epochs, seed: 1}\n", "") + written)
    assert [(problem.where, problem.message) for problem in problems] == [
        ("a.yaml:4:1", "train.until is missing"),
        ("a.yaml:4:9", "unknown key 'untill' in train"),
        ("a.yaml:7:32", "train.optimizer.lr: 'fast' is not a number"),
        ("a.yaml:8:5", "unknown key 'optimzer' in train"),
        ("a.yaml:9:23", "model.hidden: 0.5 is not a whole number"),
    ]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{}", "sweep: there is no point"),
        ("{grid: {train.seed: []}}", "sweep.grid: train.seed has no values"),
        (
            "{zip: {train.seed: [1, 2], model.hidden: [8]}}",
            "the lists are of one length, but train.seed has 2, model.hidden has 1",
        ),
        ("{grid: {train.seed: [1, 2, 1]}}", "sweep: the points 0 and 2 are the same: train.seed=1"),
        ("{grid: {train.seed: [1]}, list: [{train.seed: 2}]}", "sweep: a point has train.seed twice"),
        ("{grid: {name: [a, b]}}", "sweep: name is the same for all points"),
        ("{grid: {slurm.time: [1h]}}", "sweep: slurm.time is the same for all points"),
        ("{grid: {train.seed: [1]}, sead: 1}", "unknown key 'sead' in sweep"),
        ("{grid: {train.seed: 1}}", "sweep.grid.train.seed: 1 is not a list"),
        ("{grid: {train.optimizer: [{lr: 1}]}}", "sweep.grid.train.optimizer.0: a section is not"),
    ],
)
def test_what_is_no_sweep_is_said_in_words(fail: Fail, sweep: str, message: str) -> None:
    assert message in "\n".join(problem.message for problem in fail(text=f"{BASE}sweep: {sweep}\n"))


def test_a_grid_that_nobody_meant_is_not_worked_out(fail: Fail) -> None:
    values = ", ".join(map(str, range(1, 1000)))
    keys = (
        "train.seed",
        "model.hidden",
        "train.accumulate",
        "checkpoint.keep",
        "faults.max_restarts",
        "limits.gpu_hours",
    )
    axes = ", ".join(f"{key}: [{values}]" for key in keys)
    (problem,) = fail(text=f"{BASE}sweep: {{grid: {{{axes}}}}}\n")
    assert "at most 10,000 are meant to be launched" in problem.message


def test_a_sweep_flag_without_values_is_no_point(fail: Fail) -> None:
    assert fail(text=BASE, flags=flags("train.seed"))[0].message == "is not KEY=VALUE,VALUE,..."
    assert fail(text=BASE, flags=flags("train.seed="))[0].message == "sweep.grid: train.seed has no values"


def test_relative_paths_are_those_of_the_file(load: Load, tmp_path: Path) -> None:
    text = "name: base\nscript: a.py\nsweep: {grid: {script: [a.py, b.py]}}\n"
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    assert [point.recipe.script for point in load(text=text).points] == [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
