"""What a recipe may name: models, datasets, strategies, optimizers, schedules, read from the source of `jobs/`.

Nothing is imported or run, so that a login node without torch knows every name, option, type and default.
A thing is a function with one decorator; its keyword-only parameters are its options:

    @model("mlp")
    def mlp(*, in_features: int = 784, hidden: int = 128) -> nn.Module:
        "A perceptron with one hidden layer."
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Union

import launcher

JOBS = Path(launcher.__file__).parent.parent / "jobs"
"""Beside the launcher, in a checkout and in an installation alike."""

SOURCES = MappingProxyType(
    {
        "models": ("model", "models/*.py"),
        "datasets": ("dataset", "data/*.py"),
        "tasks": ("task", "tasks/*.py"),
        "strategies": ("strategy", "parallel/*.py"),
        "optimizers": ("optimizer", "optim.py"),
        "schedules": ("schedule", "optim.py"),
    }
)
"""Kind -> the decorator that names one, and the files that are read."""


_SAID = ("TP_DIVIDES", "UNDIVIDED", "LAYERS", "MADE_OF", "PATHS", "NO_PATHS", "BOUNDS", "DIVIDES", "HAS")
"""Names of literals in the file of a model, which say what `parallelism` and `train` ask of it and its options, or of a
data set, which say where its files are; and the values that numbers may have."""


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter: a key of the recipe's section."""

    name: str
    type: str
    """The annotation as written; empty where there is none."""
    default: Any
    """The value; the expression as text where it is no literal; None where it is required."""
    required: bool
    doc: str
    bounds: tuple[float, float | None] | None = None
    """Of a number: the least it may be, and what it stays below (None: nothing); `BOUNDS` in the file."""

    @property
    def annotation(self) -> Any:
        """The annotation as a type; `Any` where it is not one that YAML can hold."""
        return _annotation(ast.parse(self.type, mode="eval").body) if self.type else Any

    def allows(self, value: object) -> bool:
        """Whether a value of its type is within its bounds."""
        if self.bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
            return True
        least, below = self.bounds
        return least <= value < (math.inf if below is None else below)  # neither inf nor nan is

    @property
    def range_text(self) -> str:
        """Its bounds, behind what it is: `a number >= 1`; empty where it has none."""
        if self.bounds is None:
            return ""
        least, below = self.bounds
        return f" >= {least}" if below is None else f" >= {least} and < {below}"


@dataclass(frozen=True)
class Entry:
    """A name of a kind, and what it takes."""

    name: str
    description: str
    """First sentence of the docstring."""
    options: tuple[Option, ...]
    file: Path
    tp_divides: tuple[str, ...] | None = None
    """Of a model: options that `parallelism.tp` must divide; `TP_DIVIDES = ("heads",)` in its file. None: it has no
    layers that tp could share out, as far as its file says."""
    undivided: tuple[str, ...] = ()
    """Of a model: options that go with neither tp nor pp, where they are true; `UNDIVIDED` in its file."""
    layers: str | None = None
    """Of a model: the option that says how many layers there are; `LAYERS = "layers"` in its file."""
    made_of: tuple[str, ...] | None = None
    """Of a model: what it has of `blocks` and `convolutions`, which options of `train` work on; `MADE_OF` in its file.
    None: it does not say."""
    paths: tuple[str, ...] = ()
    """Of a data set: options that name files which have to be there; `PATHS = ("path",)` in its file."""
    no_paths: tuple[str, ...] = ()
    """Of a data set: values of these options that mean something else; `NO_PATHS` in its file."""
    divides: Mapping[str, str] = field(default_factory=dict)
    """Of a model: an option, and the one that it must divide; `DIVIDES = {"heads": "width"}` in its file."""
    has: tuple[Mapping[str, Any], ...] = ()
    """Of a data set: what its samples are, by its options; `HAS` in its file. The first that goes with them counts."""
    takes_any: bool = False
    """Whether it takes options besides these (`**options`), so that none can be called wrong."""

    def option(self, name: str) -> Option | None:
        """An option by its name."""
        return next((option for option in self.options if option.name == name), None)


def catalog(kind: str, jobs: Path | None = None) -> dict[str, Entry]:
    """Everything of a kind (a key of `SOURCES`), by name. Raises KeyError for another kind."""
    return dict(_catalog(kind, JOBS if jobs is None else jobs))


@cache
def _catalog(kind: str, jobs: Path) -> MappingProxyType[str, Entry]:
    decorator, pattern = SOURCES[kind]
    entries = [entry for path in sorted(jobs.glob(pattern)) for entry in _entries(path, decorator)]
    return MappingProxyType({entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)})


def _entries(path: Path, decorator: str) -> Iterator[Entry]:
    body = ast.parse(path.read_text("utf-8"), filename=str(path)).body
    said = dict(_literals(body))
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            continue
        name = next((name for item in node.decorator_list if (name := _named(item, decorator)) is not None), None)
        if name is not None:
            yield make_entry(name, node, path, said)


def make_entry(name: str, node: ast.FunctionDef, path: Path, said: Mapping[str, Any], *, own: bool = False) -> Entry:
    """The entry of a function. said: the literals of its module. own: the user's, whose options are all parameters."""
    doc = ast.get_docstring(node) or ""
    return Entry(
        name=name,
        description=_first_sentence(doc),
        options=tuple(_options(node, _argument_docs(doc), said.get("BOUNDS", {}), own=own)),
        file=path,
        tp_divides=tuple(said["TP_DIVIDES"]) if "TP_DIVIDES" in said else None,
        undivided=tuple(said.get("UNDIVIDED", ())),
        layers=said.get("LAYERS"),
        divides=said.get("DIVIDES", {}),
        made_of=tuple(said["MADE_OF"]) if "MADE_OF" in said else None,
        paths=tuple(said.get("PATHS", ())),
        no_paths=tuple(said.get("NO_PATHS", ())),
        has=tuple(said.get("HAS", ())),
        takes_any=own and node.args.kwarg is not None,
    )


def _literals(body: Iterable[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """What a module says about its entries."""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in _SAID:
            yield node.targets[0].id, ast.literal_eval(node.value)


def _named(node: ast.expr, decorator: str) -> str | None:
    """The x of `@decorator("x")`, also of `@registry.decorator("x")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    first = node.args[0]
    named = called == decorator and isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if named and isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _options(
    node: ast.FunctionDef, docs: Mapping[str, str], bounds: Mapping[str, Any], *, own: bool
) -> Iterator[Option]:
    arguments = list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
    if own:
        plain, defaults = node.args.args, node.args.defaults
        arguments = [*zip(plain, [*[None] * (len(plain) - len(defaults)), *defaults], strict=True), *arguments]
    for argument, default in arguments:
        yield Option(
            name=argument.arg,
            type=ast.unparse(argument.annotation) if argument.annotation else "",
            default=None if default is None else _literal(default),
            required=default is None,
            doc=docs.get(argument.arg, ""),
            bounds=bounds.get(argument.arg),
        )


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]


def _argument_docs(doc: str) -> dict[str, str]:
    """The `Args:` section of a docstring in Google's style."""
    docs: dict[str, str] = {}
    _, _, section = doc.partition("\nArgs:\n")
    name = ""
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        started = re.fullmatch(r" {4}(\w+)(?: \([^)]*\))?: (.*)", line)
        if started:
            name, docs[started.group(1)] = started.group(1), started.group(2).strip()
        elif name and line.strip():
            docs[name] += f" {line.strip()}"
    return docs


_PLAIN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_GENERIC: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "Sequence": list}


def _annotation(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _PLAIN.get(node.id, Any)
    if isinstance(node, ast.Constant):
        return None if node.value is None else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_annotation(node.left), _annotation(node.right)]  # noqa: UP007 - made at run time
    if isinstance(node, ast.Subscript):
        return _subscript(node)
    return Any


def _subscript(node: ast.Subscript) -> Any:
    generic = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if generic == "Literal":
        return Literal[tuple(ast.literal_eval(item) for item in inner)]
    if generic == "Optional":
        return Union[_annotation(inner[0]), None]  # noqa: UP007 - Any | None is an error before 3.14
    if generic not in _GENERIC:
        return Any
    dots = [isinstance(item, ast.Constant) and item.value is Ellipsis for item in inner]
    types = tuple(... if dot else _annotation(item) for item, dot in zip(inner, dots, strict=True))
    return _GENERIC[generic][types]
