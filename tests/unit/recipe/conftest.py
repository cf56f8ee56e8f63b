from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import Problem, RecipeError
from launcher.recipe.loader import LoadedRecipe, load_recipe

JOB = """\
name: demo
model: {name: mlp}
data: {name: synthetic, global_batch_size: 8}
train:
  until: 2 epochs
"""

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write a recipe (by default a small valid job, to which `more` is appended) and load it."""
    monkeypatch.chdir(tmp_path)

    def _load(*overrides: str, text: str = JOB, more: str = "", **options: object) -> LoadedRecipe:
        Path("a.yaml").write_text(text + more, "utf-8")
        return load_recipe(Path("a.yaml"), overrides, **options)  # type: ignore[arg-type]

    return _load


@pytest.fixture
def fail(load: Load) -> Fail:
    """Load a recipe that has mistakes, and return them."""

    def _fail(*overrides: str, **options: object) -> list[Problem]:
        with pytest.raises(RecipeError) as caught:
            load(*overrides, **options)
        return list(caught.value.problems)

    return _fail
