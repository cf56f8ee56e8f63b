"""Recipes and facts for the tests of this folder: small, invented, and changed one key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.planning.facts import Facts, Gpu, Interface
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.recipe.loader import LoadedRecipe
from launcher.recipe.schema import Recipe

LOOPBACK = Interface(name="lo", addresses=("127.0.0.1", "::1"), loopback=True)
ETHERNET = Interface(name="eth0", addresses=("10.0.0.11",), loopback=False)


def facts(*, cpus: int = 8, gpus: int = 0, **changes: Any) -> Facts:
    values: dict[str, Any] = {
        "hostname": "lovelace",
        "user": "ada",
        "cwd": "/home/ada/project",
        "python": "/usr/bin/python3",
        "python_version": "3.12.4",
        "torch_version": "2.13.0",
        "cpus": tuple(range(cpus)),
        "gpus": tuple(Gpu(index=index, name="H100", memory_bytes=80 << 30) for index in range(gpus)),
        "interfaces": (LOOPBACK, ETHERNET),
        "environment": {},
        "slurm_configured": False,
    }
    return Facts(**{**values, **changes})


def job(*, batch: int = 128, **sections: Any) -> Recipe:
    """A recipe of the built-in job."""
    document: dict[str, Any] = {
        "name": "mnist",
        "model": {"name": "mlp"},
        "data": {"name": "mnist", "global_batch_size": batch},
        "train": {"until": "8 epochs"},
    }
    return Recipe.model_validate({**document, **sections})


def script(**sections: Any) -> Recipe:
    """A recipe of a script."""
    return Recipe.model_validate({"name": "mine", "script": "/home/ada/project/train.py", **sections})


def loaded(
    recipe: Recipe, *, origins: Mapping[str, str] | None = None, overrides: tuple[str, ...] = ()
) -> LoadedRecipe:
    return LoadedRecipe(
        recipe=recipe,
        source=Path("/home/ada/project/recipe.yaml"),
        overrides=overrides,
        origins=dict(origins or {}),
        text="",
        places={"": "recipe.yaml"},
    )


def plan(recipe: Recipe, on: Facts, *, executor: str = "local", **given: Any) -> Plan:
    return make_plan(loaded(recipe, **given), on, run_id="r0", runs_dir="runs", executor=executor)


def env(of: Plan) -> dict[str, str]:
    return {variable.name: variable.value for variable in of.env}


def origins(of: Plan) -> dict[str, str]:
    return {variable.name: variable.origin for variable in of.env}
