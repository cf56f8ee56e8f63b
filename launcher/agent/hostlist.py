"""SLURM's way to write many host names, `gpu[01-03,7],login`, read without SLURM. Pure, standard library only.

For places that have no `scontrol`: a container, an image without the tools. Equal to `scontrol show hostnames`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PART = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_HOSTS = 1 << 16
"""SLURM's own limit."""


def expand(text: str) -> tuple[str, ...]:
    """The names in the order in which they are written. Raises ValueError, with the text, for what is no such list."""
    hosts = tuple(host for name in _split(text) for host in _expand_name(name, text))
    if not hosts:
        raise ValueError(f"{text!r} names no host")
    return hosts


def _split(text: str) -> Iterator[str]:
    """At the commas that are not inside brackets."""
    depth, name = 0, ""
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is not a list of hosts: its brackets do not fit")
        if character == "," and depth == 0:
            yield name
            name = ""
        else:
            name += character
    if depth:
        raise ValueError(f"{text!r} is not a list of hosts: a bracket is not closed")
    yield name


def _expand_name(name: str, text: str) -> Iterator[str]:
    """One name with any number of brackets: the last changes fastest."""
    if not name:  # `a,,b`, as SLURM has it
        return
    choices: list[list[str]] = []
    for plain, ranges in _PART.findall(name):
        if plain:
            choices.append([plain])
        if ranges or (not plain and "[]" in name):
            choices.append(list(_numbers(ranges, text)))
    count = 1
    for each in choices:
        count *= len(each)
    if count > _MAX_HOSTS:
        raise ValueError(f"{text!r} names {count} hosts")
    yield from ("".join(parts) for parts in itertools.product(*choices))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise ValueError(f"{text!r} is not a list of hosts: {each!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MAX_HOSTS:
            raise ValueError(f"{text!r} is not a list of hosts: the range {each} does not go up")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
