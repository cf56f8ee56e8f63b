"""Names and options are read from the source of `jobs/`, which is neither imported nor run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from launcher.recipe.catalog import SOURCES, catalog
from launcher.recipe.typed import describe, fits

SOURCE = '''
raise SystemExit("imported")

@model("wide")
@other
def anything(net, *, width: int, rate: float = 1e-3, kind: Literal["a", "b"] = "a",
             betas: tuple[float, float] = (0.9, 0.999), root: str | None = None, act=nn.ReLU):
    """A wide network. It has a second sentence.

    Args:
        width: How wide; 64 is
            enough.
        kind (str): Which.
    Returns:
        Nothing.
    """

@registry.model("thin")
def thin() -> None: ...

@dataset("not-a-model")
def no(): ...

@model(NAME)
def nor(): ...
'''


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/x.py").write_text(SOURCE)
    return tmp_path


def test_names_options_and_docs(jobs: Path) -> None:
    entries = catalog("models", jobs)
    assert list(entries) == ["thin", "wide"]
    wide = entries["wide"]
    assert wide.description == "A wide network."
    assert wide.file == jobs / "models/x.py"
    assert [(o.name, o.type, o.default, o.required, o.doc) for o in wide.options] == [
        ("width", "int", None, True, "How wide; 64 is enough."),
        ("rate", "float", 0.001, False, ""),
        ("kind", "Literal['a', 'b']", "a", False, "Which."),
        ("betas", "tuple[float, float]", (0.9, 0.999), False, ""),
        ("root", "str | None", None, False, ""),
        ("act", "", "nn.ReLU", False, ""),
    ]
    assert entries["thin"].options == ()
    assert entries["thin"].description == ""


def test_annotations_are_types(jobs: Path) -> None:
    options = {option.name: option.annotation for option in catalog("models", jobs)["wide"].options}
    assert options == {
        "width": int,
        "rate": float,
        "kind": Literal["a", "b"],
        "betas": tuple[float, float],
        "root": Optional[str],  # noqa: UP045 - equal, but another object
        "act": Any,
    }


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (1, int, True), (True, int, False), (1.5, int, False), ("1", int, False),
        (1, float, True), (1e-3, float, True), (True, float, False), ("x", float, False),
        (True, bool, True), (1, bool, False),
        ("x", str, True), (1, str, False), (None, str, False),
        (None, str | None, True), (3, int | str, True),
        ([1, 2.0], tuple[float, float], True), ([1], tuple[float, float], False),
        ([1, "x"], tuple[float, float], False),
        ([1, 2, 3], tuple[int, ...], True), (["x"], tuple[int, ...], False),
        ([1], list[int], True), (1, list[int], False),
        ({"a": 1}, dict[str, int], True), ({"a": "x"}, dict[str, int], False), ([], dict[str, int], False),
        ("a", Literal["a", "b"], True), ("c", Literal["a", "b"], False), (1, Literal[True], False),
        (object(), Any, True),
    ],
)  # fmt: skip
def test_values_are_checked_against_annotations(value: object, annotation: Any, right: bool) -> None:
    assert fits(value, annotation) is right


def test_annotations_in_words() -> None:
    assert describe(int | None) == "a whole number or null"
    assert describe(tuple[float, float]) == "a list of 2: a number, a number"
    assert describe(Literal["a", "b"]) == "one of a, b"


def test_unknown_kind() -> None:
    with pytest.raises(KeyError):
        catalog("colours")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("models", {"mlp", "convnet"}),
        ("datasets", {"mnist", "synthetic"}),
        ("tasks", {"classification"}),
        ("strategies", {"single", "ddp"}),
        ("optimizers", {"adamw", "sgd"}),
        ("schedules", {"constant", "linear", "cosine"}),
    ],
)
def test_the_jobs_that_ship(kind: str, names: set[str]) -> None:
    entries = catalog(kind)
    assert names <= set(entries)
    assert all(entry.description for entry in entries.values())
    assert all(option.type for entry in entries.values() for option in entry.options)
    assert set(SOURCES) == {"models", "datasets", "tasks", "strategies", "optimizers", "schedules"}
