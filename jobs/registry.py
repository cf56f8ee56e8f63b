"""Names that a recipe may use, and the functions behind them.

    @model("mlp")                                        jobs/models/mlp.py      -> nn.Module
    @dataset("mnist")                                    jobs/data/mnist.py      -> jobs.data.base.Source
    @task("classification")                              jobs/tasks/...          -> jobs.tasks.base.Task
    @strategy("ddp")      (net, grid, device, ...)       jobs/parallel/ddp.py    -> jobs.parallel.base.Shared
    @optimizer("adamw")   (parameters, ...)              jobs/optim.py           -> Optimizer
    @schedule("cosine")   (step, total, warmup, ...)     jobs/optim.py           -> float, a factor of the learning rate

The keyword-only parameters of a decorated function are the options of a recipe. `launch list` and the validation
read the same decorators from the source with `ast`, so names are literals and each option has a type and a default.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from launcher.recipe.schema import DataSection, ModelSection

Function = TypeVar("Function", bound=Callable[..., Any])

HOMES: Mapping[str, str] = {
    "model": "jobs.models",
    "dataset": "jobs.data",
    "task": "jobs.tasks",
    "strategy": "jobs.parallel",
    "optimizer": "jobs.optim",
    "schedule": "jobs.optim",
}
"""Where the functions of each kind live: a package (one file each) or one module."""


class UntrainableError(Exception):
    """Nothing can be trained as the recipe and its data are. Another attempt would end alike, and there is none."""

    launch_plain = True


class OptionError(UntrainableError, ValueError):
    """What a recipe says does not go: the message has the key, the value, and what would go."""


_functions: dict[tuple[str, str], Callable[..., Any]] = {}


def model(name: str) -> Callable[[Function], Function]:
    """Register a function that returns a network."""
    return _register("model", name)


def dataset(name: str) -> Callable[[Function], Function]:
    """Register a function that returns a `jobs.data.base.Source`."""
    return _register("dataset", name)


def task(name: str) -> Callable[[Function], Function]:
    """Register a function that returns a `jobs.tasks.base.Task`."""
    return _register("task", name)


def strategy(name: str) -> Callable[[Function], Function]:
    """Register a function of (net, grid, device) that returns a `jobs.parallel.base.Shared`."""
    return _register("strategy", name)


def optimizer(name: str) -> Callable[[Function], Function]:
    """Register a function that returns an optimizer of given parameters."""
    return _register("optimizer", name)


def schedule(name: str) -> Callable[[Function], Function]:
    """Register a pure function of (step, total_steps, warmup_steps): the factor of the learning rate."""
    return _register("schedule", name)


def find(kind: str, name: str) -> Callable[..., Any]:
    """The function behind a name; imports the module that defines it. Raises ValueError for an unknown name."""
    for module in _modules(kind, first=name):
        if (kind, name) in _functions:
            break
        importlib.import_module(module)
    if (kind, name) not in _functions:
        raise ValueError(f"{kind} {name!r} does not exist; there are: {', '.join(names(kind))}")
    return _functions[kind, name]


def build(kind: str, name: str, options: Mapping[str, Any], *args: Any) -> Any:
    """Call the function behind a name with the options of a recipe. Raises ValueError for an unknown name."""
    return find(kind, name)(*args, **options)


def build_section(kind: str, section: ModelSection | DataSection) -> Any:
    """What a section of the recipe names, or what its `target`, a function of the user's own, makes.

    Raises OptionError, ValueError for an unknown name.
    """
    if section.target is None:
        return build(kind, section.name, section.options)
    from jobs.target import call_target

    target = section.target
    if kind != "dataset":
        return call_target(kind, target, section.options)
    from jobs.data.given import Given

    return Given(target, lambda: call_target("data", target, section.options))


def names(kind: str) -> list[str]:
    """All names of a kind."""
    load_all(kind)
    return sorted(name for a_kind, name in _functions if a_kind == kind)


def load_all(*kinds: str) -> None:
    """Import every module that defines a name of these kinds (all, when none is given)."""
    for kind in kinds or HOMES:
        for module in _modules(kind):
            importlib.import_module(module)


def _register(kind: str, name: str) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        known = _functions.get((kind, name))
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise ValueError(
                f"{kind} {name!r} is defined twice: {known.__module__}.{known.__qualname__} "
                f"and {function.__module__}.{function.__qualname__}; rename one"
            )
        _functions[kind, name] = function
        return function

    return decorate


def _modules(kind: str, first: str = "") -> Iterator[str]:
    """Names of the modules that may define a kind, the likely one first."""
    home = importlib.import_module(HOMES[kind])
    found = [f"{home.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(home, "__path__", []))]
    yield home.__name__
    yield from sorted(found, key=lambda module: module != f"{home.__name__}.{first}")
