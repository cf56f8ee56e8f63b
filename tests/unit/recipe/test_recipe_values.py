"""Numbers by schema, text stays text, only true and false are booleans."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.errors import Problem
from launcher.recipe.loader import LoadedRecipe
from launcher.recipe.schema import Recipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]
Way = Callable[[Load, str, str], Recipe]

TEXTS = {
    "train.optimizer.lr": "{}\ntrain:\n  until: 2 epochs\n  optimizer:\n    lr: VALUE\n",
    "data.loader_workers": "{}\n  loader_workers: VALUE\ntrain: {{until: 2 epochs}}\n",
    "tracking.wandb.project": "{}\ntrain: {{until: 2 epochs}}\ntracking:\n  wandb:\n    project: VALUE\n",
    "tracking.tensorboard": "{}\ntrain: {{until: 2 epochs}}\ntracking:\n  tensorboard: VALUE\n",
}
HEAD = "name: demo\nmodel: {name: mlp}\ndata:\n  name: synthetic\n  global_batch_size: 8"

NUMBERS = [
    ("1e-3", 1e-3),
    ("1E5", 1e5),
    ("5e6", 5e6),
    (".5", 0.5),
    ("1_000", 1000.0),
    ("1.", 1.0),
    ("2.5E+2", 250.0),
    ("+3", 3.0),
]
WORDS = ["on", "off", "yes", "no", "y", "n", "NO", "Yes", "ON"]


def in_file(load: Load, key: str, text: str) -> Recipe:
    return load(text=TEXTS[key].format(HEAD).replace("VALUE", text)).recipe


def in_override(load: Load, key: str, text: str) -> Recipe:
    return load(f"{key}={text}").recipe


def as_flag(load: Load, key: str, text: str) -> Recipe:
    return load(flags={key: ("--flag", text)}).recipe


def from_environment(load: Load, key: str, text: str) -> Recipe:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECIPE_TEST_VALUE", text)
        return in_file(load, key, '"${oc.env:RECIPE_TEST_VALUE}"')


WAYS = [in_file, in_override, as_flag, from_environment]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_number_spellings_are_numbers_however_they_arrive(load: Load, way: Way, text: str, number: float) -> None:
    """F003"""
    recipe = way(load, "train.optimizer.lr", text)
    value = recipe.train.optimizer.options["lr"]
    assert value == number
    assert type(value) is float


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("text", "number"), [("1e3", 1000), ("1_000", 1000), ("0x10", 16), ("0o17", 15), ("8.0", 8)])
def test_whole_numbers_are_whole_however_they_arrive(load: Load, way: Way, text: str, number: int) -> None:
    """F003"""
    value = way(load, "data.loader_workers", text).data.loader_workers
    assert value == number
    assert type(value) is int


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", ["1e10", "no", "0o17", "true", "1_000", ".5", "on", "0x1F", "007", "12"])
def test_text_stays_text_where_text_is_wanted(load: Load, way: Way, text: str) -> None:
    """F003, F025"""
    assert way(load, "tracking.wandb.project", text).tracking.wandb.project == text


@pytest.mark.parametrize("name", ["1e10", "no", "0o17", "12"])
def test_a_run_may_be_called_like_a_number(load: Load, name: str) -> None:
    """F003"""
    assert load(f"name={name}").recipe.name == name
    assert load(text=f"name: {name}\nmodel: {{name: mlp}}\ndata: {{name: synthetic, global_batch_size: 8}}\n"
                "train: {until: 1 steps}\n").recipe.name == name  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("True", True), ("FALSE", False)])
def test_true_and_false_are_booleans(load: Load, way: Way, text: str, value: bool) -> None:
    """F025"""
    assert way(load, "tracking.tensorboard", text).tracking.tensorboard is value


@pytest.mark.parametrize("word", WORDS)
def test_other_words_are_not_booleans(fail: Fail, word: str) -> None:
    """F025"""
    (problem,) = fail(more=f"tracking:\n  tensorboard: {word}\n")
    assert problem.where == "a.yaml:7:16"
    assert problem.message == f"tracking.tensorboard: {word!r} is not true or false"
    assert "write true or false" in problem.hint
    (problem,) = fail(f"tracking.tensorboard={word}")
    assert problem.where == f"tracking.tensorboard={word}"


@pytest.mark.parametrize("word", WORDS)
def test_words_are_text_as_values_and_as_keys(load: Load, word: str) -> None:
    """F025"""
    recipe = load(more=f"env: {{{word}: {word}}}\nextra: {{{word}: {word}}}\n").recipe
    assert recipe.env == {word: word}
    assert recipe.extra == {word: word}


@pytest.mark.parametrize(
    ("key", "kind"),
    [("true", "a boolean"), ("False", "a boolean"), ("1", "a number"), ("1e3", "a number"), ("null", "null")],
)
def test_keys_that_are_not_text_are_rejected_with_their_line(fail: Fail, key: str, kind: str) -> None:
    """F025"""
    (problem,) = fail(more=f"env:\n  {key}: x\n")
    assert problem.where == "a.yaml:7:3"
    assert problem.message == f"key {key} in env is not text but {kind}"
    assert problem.hint == f'quote it: "{key}"'


def test_quoted_keys_are_text(load: Load) -> None:
    """F025"""
    assert load(more='env: {"1": a, "true": b}\n').recipe.env == {"1": "a", "true": "b"}


def test_quoted_numbers_are_text(fail: Fail) -> None:
    (problem,) = fail(more='resources: {nodes: "2"}\n')
    assert problem.message == (
        'resources.nodes: the text "2" is not a whole number from 1 to 10000 or a range `MIN:MAX`'
    )
    assert problem.hint == "remove the quotes"


def test_environment_values_are_kept_to_the_letter(load: Load) -> None:
    recipe = load(more="network: {nccl: {IB_TC: 0x6a, SOCKET_NTHREADS: 4, DEBUG: INFO, IB_DISABLE: true}}\n").recipe
    assert recipe.network.nccl == {"IB_TC": "0x6a", "SOCKET_NTHREADS": 4, "DEBUG": "INFO", "IB_DISABLE": True}


@pytest.mark.parametrize("key", ["name", "data.global_batch_size", "train.seed", "resources.nodes", "env.A"])
def test_null_only_where_optional(fail: Fail, key: str) -> None:
    (problem,) = fail(f"{key}=null")
    assert problem.where == f"{key}=null"
    assert "null is not" in problem.message


@pytest.mark.parametrize("spelling", ["null", "~", ""])
def test_null_turns_optional_things_off(load: Load, spelling: str) -> None:
    assert load(f"train.eval_every={spelling}").recipe.train.eval_every is None


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e999"])
def test_numbers_that_json_has_no_word_for_are_not_numbers(fail: Fail, number: str) -> None:
    (problem,) = fail(f"train.optimizer.lr={number}")
    assert problem.message == f"train.optimizer.lr: {number!r} is not a number"


def test_overrides_take_lists_sections_quotes_and_equals_signs(load: Load) -> None:
    recipe = load(
        "tracking.wandb.tags=[a, 1e3, 'no']",
        "train.optimizer={name: sgd, lr: 1e-2}",
        "env.A=b=c=d",
        "env.URL=http://host:80/x?y=1",
        "env.NOTE=a: b # c",
        'env.Q="1"',
    ).recipe
    assert recipe.tracking.wandb.tags == ("a", "1e3", "no")
    assert (recipe.train.optimizer.name, recipe.train.optimizer.options) == ("sgd", {"lr": 0.01})
    assert recipe.env == {"A": "b=c=d", "URL": "http://host:80/x?y=1", "NOTE": "a: b # c", "Q": "1"}


@pytest.mark.parametrize(
    ("written", "least", "most", "dumped"),
    [("2", 2, 2, 2), ("1:4", 1, 4, "1:4"), ('"1:4"', 1, 4, "1:4"), ("4:4", 4, 4, 4), ("10:20", 10, 20, "10:20")],
)
def test_nodes_are_a_number_or_a_range(load: Load, written: str, least: int, most: int, dumped: object) -> None:
    """YAML 1.1 takes a bare `1:4` for 64, `10:20` for 620."""
    resources = load(more=f"resources: {{nodes: {written}}}\n").recipe.resources
    assert (resources.min_nodes, resources.max_nodes, resources.is_elastic) == (least, most, least < most)
    assert resources.model_dump(mode="json")["nodes"] == dumped
