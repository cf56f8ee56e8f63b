"""Files of YAML that a user writes, read into trees: recipes, profiles, the user's own settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.recipe.hints import did_you_mean
from launcher.recipe.nodes import Findings, Layer, Node, Place, Table
from launcher.recipe.paths import is_folder, real
from launcher.recipe.yamltext import parse_yaml


def read_tree(path: Path, layer: Layer, findings: Findings, *, kind: str = "recipe") -> tuple[str, Node | None]:
    """The text and the tree of a file; None, with the reason in `findings`, where it is none of its kind at all."""
    start = Place(shown(path), layer, real(path).parent, line=1, column=1)
    text = _read_text(path, start, findings, kind)
    tree = None if text is None else parse_yaml(text, start, findings, kind=kind)
    if tree is not None and not isinstance(tree, Table):
        findings.add(tree.place, f"is not a {kind}: it has no keys", f"a {kind} is made of `key: value` lines")
        tree = None
    return text or "", tree


def shown(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the current folder."""
    absolute_path = path if path.is_absolute() else Path.cwd() / path
    try:
        return str(absolute_path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def neighbours(path: Path) -> str:
    """What a mistyped file name may have meant."""
    folder = path.parent
    if not is_folder(folder):
        return f"there is no folder {folder}"
    return did_you_mean(path.name, [other.name for other in folder.glob("*.y*ml")])


def _read_text(path: Path, start: Place, findings: Findings, kind: str) -> str | None:
    whole = replace(start, line=0)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        hint = neighbours(path)
        # Whole, as it was typed, so that it can be copied.
        findings.add(whole, "there is no such file", hint.replace("mean '", f"mean '{_typed_folder(path)}"))
        return None
    except IsADirectoryError:
        findings.add(whole, f"is a folder, not a {kind}", _files_in(path))
        return None
    except OSError as error:
        findings.add(whole, f"cannot be read: {error.strerror}")
        return None
    if path.suffix == ".py":
        findings.add(whole, f"is a script, not a {kind}", "`launch SCRIPT.py -- arguments` runs it as it is")
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        findings.add(start.at(line, column), f"is not UTF-8: byte 0x{content[error.start]:02x}", "save it as UTF-8")
        return None


def _typed_folder(path: Path) -> str:
    return "" if path.parent == Path() else f"{path.parent}/"


def _files_in(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.yaml"))
    return f"it holds {', '.join(names)}" if names else ""
