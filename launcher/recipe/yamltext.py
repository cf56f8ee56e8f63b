"""YAML text to a tree. PyYAML reads the syntax; what a word means is ours (YAML 1.2: `no` and `on` are text)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from launcher.recipe.masks import MASK, names_secret
from launcher.recipe.nodes import Entry, Findings, Items, Keys, Node, Place, Scalar, Table, dotted
from launcher.recipe.scalars import is_null, plain_value

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""YAML's own; `str.splitlines` knows more."""

_HALF = re.compile("[\ud800-\udfff]")

MAX_DEPTH = 40
MAX_NODES = 50_000
"""Anchors may repeat a part, and repeats of repeats grow without bound; no recipe comes near these two."""


EMPTY_HINTS = {
    "recipe": "a recipe has a name and either model, data and train, or a script",
    "profile": "a profile names its `executor`: slurm, local, here, docker, ssh or sky",
    "config": "its one key is `on: NAME`; or remove the file",
}
"""What a file of each kind holds at least."""


def parse_yaml(text: str, start: Place, findings: Findings, *, kind: str = "recipe") -> Node | None:
    """Read YAML text that begins at `start`. Returns None, with the reason in `findings`, where it cannot be read."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        _syntax_error(error, text, start, findings)
        return None
    except yaml.reader.ReaderError as error:
        before = _LINE_BREAK.split(text[: error.position])
        place = start.at(len(before), len(before[-1]) + 1)
        findings.add(place, f"character {chr(error.character)!r} is not allowed in YAML")
        return None
    except RecursionError:
        findings.add(start, "nested too deeply to be read")
        return None
    if root is None:
        findings.add(start, "is empty", EMPTY_HINTS[kind])
        return None
    try:
        return _Builder(start, findings).build(root, ())
    except _TooBig as error:
        findings.add(error.place, f"nested deeper than {MAX_DEPTH} levels, or more than {MAX_NODES} values")
        return None


def parse_value(text: str, place: Place, findings: Findings) -> Node | None:
    """Read the VALUE of KEY=VALUE: YAML where it begins with a bracket, brace or quote, else the bare text as typed."""
    stripped = text.strip()
    if stripped.startswith(("[", "{", '"', "'")):
        return parse_yaml(stripped, place, findings)
    if "\0" in stripped:
        return _without_nul(stripped, (), place, findings)
    return Scalar(stripped, place, null=is_null(stripped))


def _without_nul(text: str, keys: Keys, place: Place, findings: Findings) -> Scalar:
    """Paths, arguments and variables cannot hold it."""
    findings.add(place, (f"{dotted(keys)}: " if keys else "") + "no text may hold the character NUL")
    return Scalar(text.replace("\0", ""), place, plain=False)


class _TooBig(Exception):  # noqa: N818 - caught a few lines above
    def __init__(self, place: Place) -> None:
        super().__init__(str(place))
        self.place = place


@dataclass
class _Builder:
    """PyYAML's nodes to ours, with every finding of a kind that is not syntax."""

    start: Place
    findings: Findings
    seen: int = 0

    def build(self, node: yaml.Node, keys: Keys) -> Node:
        place = self._place(node)
        self.seen += 1
        if len(keys) > MAX_DEPTH or self.seen > MAX_NODES:
            raise _TooBig(place)
        self._refuse_tag(node, keys, place)
        if isinstance(node, yaml.MappingNode):
            return Table(dict(self._entries(node, keys)), place)
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(self.build(item, (*keys, str(i))) for i, item in enumerate(node.value)), place)
        assert isinstance(node, yaml.ScalarNode), "YAML has no fourth kind"
        text = self._whole(node.value, keys, place)
        if "\0" in text and keys[:1] != ("extra",):
            return _without_nul(text, keys, place, self.findings)
        plain = not node.style
        return Scalar(text, place, plain=plain, null=plain and is_null(text))

    def _whole(self, text: str, keys: Keys, place: Place) -> str:
        """JSON writes a character beyond 16 bits as two halves (`"\\ud83d\\ude00"`), and JSON is YAML."""
        if not _HALF.search(text):
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self.findings.add(place, f"{dotted(keys)}: this holds one half of a character (\\ud800 to \\udfff)")
            return _HALF.sub("", text)

    def _entries(self, node: yaml.MappingNode, keys: Keys) -> Iterator[tuple[str, Entry]]:
        first: dict[str, tuple[Place, str]] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            key = self._key(key_node, keys, place)
            if key is None:
                continue
            if key in first:
                before, value = first[key]
                here = _brief(value_node, key)
                message = f"duplicate key {key!r}{_within(keys)}: {value} at {before}, {here} here"
                self.findings.add(place, message, "keep one of the two")
                continue
            first[key] = (place, _brief(value_node, key))
            yield key, Entry(place, self.build(value_node, (*keys, key)))

    def _key(self, node: yaml.Node, keys: Keys, place: Place) -> str | None:
        """The key as text; anything that YAML would not read as text is an error, never converted."""
        if not isinstance(node, yaml.ScalarNode):
            self.findings.add(place, f"a key{_within(keys)} is not text")
            return None
        text = str(node.value)
        if not node.style and text == "<<":
            self.findings.add(place, "`<<` is not part of YAML 1.2", "use `extends:`, or repeat the keys")
            return None
        if not node.style and (is_null(text) or not isinstance(plain_value(text), str)):
            kind = "null" if is_null(text) else "a boolean" if isinstance(plain_value(text), bool) else "a number"
            self.findings.add(
                place, f"key {text or 'null'}{_within(keys)} is not text but {kind}", f'quote it: "{text}"'
            )
            return None
        return text

    def _refuse_tag(self, node: yaml.Node, keys: Keys, place: Place) -> None:
        usual = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}[type(node)]
        if node.tag not in (f"tag:yaml.org,2002:{usual}", "!"):
            path = f"{dotted(keys)}: " if keys else ""
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.findings.add(place, f"{path}the tag {tag} has no meaning here", "leave it out")

    def _place(self, node: yaml.Node) -> Place:
        return self.start.at(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax_error(error: yaml.MarkedYAMLError, text: str, start: Place, findings: Findings) -> None:
    mark = error.problem_mark or error.context_mark
    place = start if mark is None else start.at(*_inside(text, mark.line + 1, mark.column + 1))
    problem = error.problem or error.context or "not YAML"
    findings.add(place, f"not valid YAML: {problem}", _syntax_hint(problem))


def _inside(text: str, line: int, column: int) -> tuple[int, int]:
    """A mark at the end of the text lies one line below it; the last written character is what a user can look at."""
    lines = _LINE_BREAK.split(text)
    if not lines[-1] and lines[1:]:
        del lines[-1]
    return (line, column) if line <= len(lines) else (len(lines), max(len(lines[-1]), 1))


def _syntax_hint(problem: str) -> str:
    if "'\\t'" in problem:
        return "YAML indents with spaces, never with tabs"
    if "mapping values are not allowed" in problem:
        return "a value that contains `: ` needs quotes; keys of one section start in the same column"
    if "expected a single document" in problem or "but found another document" in problem:
        return "one recipe per file"
    if "expected ',' or" in problem:
        return "a bracket or brace is not closed, or a value in it needs quotes"
    return ""


def _brief(node: yaml.Node, key: str) -> str:
    """A value in the message about two of them."""
    if isinstance(node, yaml.ScalarNode):
        return MASK if names_secret(key) else repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a section"


def _within(keys: Keys) -> str:
    return f" in {dotted(keys)}" if keys else ""
