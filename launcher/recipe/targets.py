"""`target: package.module:function`: what the user's own function takes, read from its source. Nothing is imported.

The function is looked for as a worker will: in the folder where the run works, then in what is installed. What the
source does not say (a function that is made at run time, a module without a source) is not checked here: the worker
says it before the training begins.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from launcher.recipe.catalog import Entry, make_entry
from launcher.recipe.checks_script import absolute
from launcher.recipe.hints import did_you_mean
from launcher.recipe.nodes import Scalar, Table, present, section_at
from launcher.recipe.paths import real
from launcher.recipe.schema import TARGET

FORM = "package.module:function"


@dataclass(frozen=True)
class TargetFault:
    """Why a target cannot be called."""

    message: str
    hint: str = ""


def target_of(root: Table, section: Table) -> Entry | TargetFault | None:
    """What is behind the `target` of a section of a recipe; None where its source does not say."""
    entry = section.entries[TARGET]
    if not isinstance(entry.value, Scalar):
        return None  # the schema says so
    here, workdir = Path.cwd(), root.entries.get("workdir")
    if workdir is not None and isinstance(workdir.value, Scalar) and not workdir.value.null:
        here = absolute(workdir.value)
    env = section_at(root, ("env",))
    path = None if env is None else env.entries.get("PYTHONPATH")
    more = path.value.text if path is not None and isinstance(path.value, Scalar) else os.environ.get("PYTHONPATH", "")
    found = read_target(entry.value.text, (here, *(here / folder for folder in more.split(os.pathsep) if folder)))
    if not isinstance(found, TargetFault):
        return found
    if present(root, "setup"):
        return None  # lines of bash may say where modules are
    beside = real(entry.value.place.folder)
    if beside != real(here) and not isinstance(read_target(entry.value.text, (beside,)), TargetFault):
        return replace(found, hint=f"there is one in {beside}, where the recipe is: write `workdir: .` in it")
    return found


@cache
def read_target(target: str, folders: tuple[Path, ...]) -> Entry | TargetFault | None:
    """The function behind a target and its options; None where the source does not say.

    folders: where modules are looked for before what is installed.
    """
    module, colon, path = target.partition(":")
    names = path.split(".")
    if not colon or not all(name.isidentifier() for name in (*module.split("."), *names)):
        return TargetFault(f"{target!r} is not `{FORM}`", f"as in `{FORM}`")
    found = _find(module, folders)
    if isinstance(found, TargetFault) or found is None:
        return found
    try:
        body = ast.parse(found.read_bytes(), filename=str(found)).body
    except SyntaxError as error:
        return TargetFault(f"{found}:{error.lineno} is no Python: {error.msg}")
    return _entry(names, body, found)


def _find(module: str, folders: Sequence[Path]) -> Path | TargetFault | None:
    """The file of a module; None where it has none that can be read."""
    first, *rest = module.split(".")
    spec, searched = _top(first, folders), list(map(str, folders))
    for name in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return TargetFault(f"{spec.name} ({spec.origin}) is a file, which has no module {name} in it")
        searched = list(spec.submodule_search_locations)
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{name}", searched)
    if spec is None:
        near = did_you_mean(module.rpartition(".")[2], _modules(searched))
        installed = "" if rest and searched != list(map(str, folders)) else ", and none is installed"
        message = f"there is no module {module} in {', '.join(searched)}{installed}"
        return TargetFault(message, near or "it is looked for in the folder where the run works: `workdir`")
    return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None


def _top(name: str, folders: Sequence[Path]) -> importlib.machinery.ModuleSpec | None:
    """A package or module by its first name, as an import there would find it."""
    spec = importlib.machinery.PathFinder.find_spec(name, [*map(str, folders), *sys.path])
    if spec is not None:
        return spec
    try:
        return importlib.util.find_spec(name)  # also by the hooks of what is installed as editable
    except ValueError:  # __main__, and what is half imported
        return None


def _modules(folders: Sequence[str]) -> list[str]:
    found = []
    for folder in filter(os.path.isdir, folders):
        found += [path.stem for path in Path(folder).iterdir() if path.suffix in ("", ".py")]
    return found


def _entry(names: Sequence[str], body: Sequence[ast.stmt], file: Path) -> Entry | TargetFault | None:
    """The function, or the class, of these names in a module: `Nets.small` is a method of a class."""
    first, *rest = names
    known = {name: node for node in body for name in _named(node)}
    if first not in known:
        is_open = any(_is_open(node) for node in body)
        return None if is_open else TargetFault(f"there is no {first} in {file}", did_you_mean(first, known))
    node = known[first]
    if rest or (isinstance(node, ast.FunctionDef) and not all(map(_leaves_it, node.decorator_list))):
        return None
    if isinstance(node, ast.ClassDef):
        made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        if made is None:
            return None
        made.args.args = made.args.args[1:]
        return make_entry(first, made, file, {}, own=True)
    return make_entry(first, node, file, {}, own=True) if isinstance(node, ast.FunctionDef) else None


def _leaves_it(decorator: ast.expr) -> bool:
    """Whether a decorator is one of jobs/registry.py, which leave a function as it is."""
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in ("model", "dataset")


def _named(node: ast.stmt) -> list[str]:
    """What a statement of a module gives a name to."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _is_open(node: ast.stmt) -> bool:
    """Whether more names may come of it than are written there."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    return isinstance(node, ast.If | ast.Try | ast.With | ast.For) or (
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    )
