"""Whatever is written: a recipe, or a RecipeError whose places exist. What is dumped loads to the same recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.errors import Problem, RecipeError
from launcher.recipe.dump import dump_yaml
from launcher.recipe.hints import key_paths
from launcher.recipe.loader import load_recipe, script_recipe
from launcher.recipe.masks import shown_override
from launcher.recipe.schema import Recipe
from launcher.recipe.yamltext import MAX_DEPTH

LEAVES = sorted({path.rpartition(".")[2] for path in key_paths()})
WORDS = ["mlp", "mnist", "8 epochs", "10m", "auto", "null", "true", "no", "1e-3", "0x1F", "${name}", "${", "", "-1"]
KEYS = st.sampled_from(LEAVES) | st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.sampled_from(sorted(Recipe.model_fields)) | KEYS, VALUES, max_size=6)

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(path: Path, text: str, overrides: list[str]) -> None:
    path.write_text(text, "utf-8", newline="")
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    for problem in problems(path, overrides):
        place = re.fullmatch(r".*a\.yaml:(\d+):(\d+)", problem.where, re.DOTALL)
        if place is None:
            assert problem.where in [shown_override(each) for each in overrides]
            continue
        line, column = map(int, place.groups())
        assert 1 <= line <= len(lines)
        assert 1 <= column <= max(len(lines[line - 1]), 1) + 1


def problems(path: Path, overrides: list[str]) -> tuple[Problem, ...]:
    try:
        load_recipe(path, overrides)
    except RecipeError as error:
        return error.problems
    return ()


@quick
@given(MAPPINGS)
def test_any_mapping_is_a_recipe_or_a_recipe_error(tmp_path: Path, mapping: dict[str, Any]) -> None:
    check(tmp_path / "a.yaml", yaml.safe_dump(mapping, allow_unicode=True), [])


@quick
@given(st.text())
@example("\ufeffname: a")
@example("a: !!binary x")
@example("? [a]\n: b")
@example("a: &a {b: *a}")
@example("%YAML 9.9\n---\na: 1")
@example("a: |\n  x\n b: 2")
def test_any_text_is_a_recipe_or_a_recipe_error(tmp_path: Path, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    check(tmp_path / "a.yaml", text, [])


@quick
@example([("name", ":PASSWD")])
@given(st.lists(st.tuples(st.sampled_from(key_paths()) | st.text(max_size=8), st.text(max_size=8)), max_size=3))
@example([("script", "\0")])
@example([("runs_dir", "a\0b")])
def test_any_override_is_a_value_or_a_recipe_error(tmp_path: Path, overrides: list[tuple[str, str]]) -> None:
    text = "name: a\nmodel: {name: mlp}\ndata: {name: mnist, global_batch_size: 1}\ntrain: {until: 1 steps}\n"
    check(tmp_path / "a.yaml", text, [f"{key}={value}" for key, value in overrides])


@quick
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=5))
@example(["${a}", "\\${a}", "\\\\${a}\\", "$", "1e3", "null", " x ", "\n", "- a", "#"])
def test_arguments_survive_the_record(tmp_path: Path, args: list[str]) -> None:
    script = tmp_path / "t.py"
    script.touch()
    recipe = script_recipe(script, args).recipe
    assert recipe.args == tuple(args)
    assert Recipe.model_validate(recipe.model_dump(mode="json", by_alias=True)) == recipe
    (tmp_path / "r.yaml").write_text(dump_yaml(recipe.model_dump(mode="json", by_alias=True)), "utf-8", newline="")
    assert load_recipe(tmp_path / "r.yaml").recipe == recipe


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


SMALL = {
    "name": "a",
    "model": {"name": "mlp"},
    "data": {"name": "mnist", "global_batch_size": 1},
    "train": {"until": "1 steps"},
}


@quick
@given(
    st.fixed_dictionaries(
        {
            "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True),
            "model": st.just({"name": "mlp", "hidden": 32}),
            "data": st.fixed_dictionaries({"name": st.just("mnist"), "global_batch_size": st.integers(1, 10**9)}),
            "train": st.fixed_dictionaries(
                {
                    "until": st.integers(1, 10**6).map("{} steps".format),
                    "optimizer": st.fixed_dictionaries({"lr": st.floats(1e-9, 1e9)}),
                    "precision": st.sampled_from(["fp32", "bf16"]),
                }
            ),
            "network": st.fixed_dictionaries(
                {"timeout": st.integers(1, 999).map("{}m".format), "nccl": st.dictionaries(st.just("X"), st.integers())}
            ),
            "tracking": st.fixed_dictionaries(
                {"wandb": st.fixed_dictionaries({"tags": st.lists(st.text("ab1e", max_size=12))})}
            ),
            "extra": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), JSON, max_size=3),
        }
    )
)
@example({**SMALL, "extra": {"${": None, "a": {"${b}": "${c}"}}})
def test_a_recipe_is_the_same_after_dump_and_load(tmp_path: Path, mapping: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(mapping)
    dumped = recipe.model_dump(mode="json", by_alias=True)
    assert Recipe.model_validate(dumped) == recipe
    (tmp_path / "r.yaml").write_text(dump_yaml(dumped), "utf-8", newline="")
    loaded = load_recipe(tmp_path / "r.yaml").recipe
    assert loaded == recipe
    assert loaded.model_dump(mode="json", by_alias=True) == dumped


@pytest.mark.parametrize(("depth", "fine"), [(MAX_DEPTH - 2, True), (MAX_DEPTH + 2, False)])
def test_depth_is_bounded(tmp_path: Path, depth: int, fine: bool) -> None:
    nested = "[" * depth + "]" * depth
    text = "name: a\nmodel: {name: mlp}\ndata: {name: mnist, global_batch_size: 1}\ntrain: {until: 1 steps}\n"
    (tmp_path / "a.yaml").write_text(f"{text}extra: {{a: {nested}}}\n")
    if fine:
        load_recipe(tmp_path / "a.yaml")
    else:
        with pytest.raises(RecipeError, match="nested deeper"):
            load_recipe(tmp_path / "a.yaml")
