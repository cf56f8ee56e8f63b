"""`${...}` is resolved once, at launch; what is missing is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.errors import Problem
from launcher.recipe.loader import LoadedRecipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("DATA", "/data/x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${oc.env:DATA}", "/data/x"),
        ("${oc.env:DATA}/train", "/data/x/train"),
        ("${oc.env:EMPTY}", ""),
        ("${oc.env:NOT_SET,a}", "a"),
        ("${oc.env:NOT_SET,/a/b-c.d}", "/a/b-c.d"),
        ("${oc.env:NOT_SET,''}", ""),
        ("${oc.env:NOT_SET,${oc.env:DATA}}", "/data/x"),
        ("${oc.env:NOT_SET,${name}}", "demo"),
        ("${name}-${train.seed}", "demo-0"),
        ("${data.global_batch_size}", "8"),
        ("${checkpoint.every}", "1 epoch"),
        ("\\${name}", "${name}"),
        ("$HOME", "$HOME"),
        ("x/{run_dir}", "x/{run_dir}"),
    ],
)
def test_what_can_be_resolved(load: Load, text: str, value: str) -> None:
    """F059: set, empty, defaults (with a slash, empty, nested), other keys and their defaults, escapes."""
    assert load(more=f"env:\n  A: '{text.replace(chr(39), chr(39) * 2)}'\n").recipe.env == {"A": value}
    assert load(f"env.A={text}").recipe.env == {"A": value}


def test_resolved_text_is_typed_by_the_schema(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """F059"""
    monkeypatch.setenv("LR", "1e-3")
    recipe = load("train.optimizer.lr=${oc.env:LR}", "train.seed=${train.accumulate}", "env.LR=${oc.env:LR}").recipe
    assert recipe.train.optimizer.options == {"lr": 0.001}
    assert recipe.train.seed == 1
    assert recipe.env == {"LR": "1e-3"}


def test_a_whole_section_can_be_repeated(load: Load) -> None:
    recipe = load(
        more="extra: {common: {A: x}, tags: [t, u]}\n",
        flags={"env": ("--env", "${extra.common}"), "tracking.wandb.tags": ("--tags", "${extra.tags}")},
    ).recipe
    assert recipe.env == {"A": "x"}
    assert recipe.tracking.wandb.tags == ("t", "u")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("${oc.env:NOT_SET}", "environment variable NOT_SET is not set", "set it, or give a default"),
        ("a/${oc.env:NOT_SET}/b", "environment variable NOT_SET is not set", "${oc.env:NOT_SET,...}"),
        (
            "${train.sed}",
            "'${train.sed}' refers to 'train.sed', and there is no such key",
            "did you mean 'train.seed'?",
        ),
        ("${", "'${' cannot be read", "\\${"),
        ("${nope:1}", "'${nope:1}' cannot be resolved: Unsupported interpolation type nope", ""),
        ("${env.A}", "'${env.A}' cannot be resolved", ""),
    ],
)
def test_what_cannot_be_resolved(fail: Fail, text: str, message: str, hint: str) -> None:
    """F059: key path, variable name and place."""
    (problem,) = fail(more=f"env:\n  A: '{text}'\n")
    assert problem.where == "a.yaml:7:6"
    assert problem.message.startswith(f"env.A: {message}")
    assert hint in problem.hint


def test_every_missing_variable_is_listed_with_the_other_mistakes(fail: Fail) -> None:
    """F059"""
    problems = fail("train.seed=${oc.env:NOT_SET}", more="env: {A: '${oc.env:NOT_SET}', B: '${'}\nlr: 3\n")
    assert [p.where for p in problems] == [
        "a.yaml:6:10",
        "a.yaml:6:34",
        "a.yaml:7:1",
        "train.seed=${oc.env:NOT_SET}",
    ]
    assert problems[3].message == "train.seed: environment variable NOT_SET is not set"
