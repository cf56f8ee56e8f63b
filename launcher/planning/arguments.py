"""The arguments of a script, from a list or a mapping of a recipe. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.recipe.schema import Argument


def words_of(args: Mapping[str, Argument] | tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command line: those of a list unchanged, those of a mapping in its order."""
    if isinstance(args, tuple):
        return args
    return tuple(word for key, value in args.items() for word in _words(key, value))


def option(key: str) -> str:
    """How a key is given: `--key`, and as it is where it begins with a dash (`-v`)."""
    return key if key.startswith("-") else f"--{key}"


def _words(key: str, value: Argument) -> Iterator[str]:
    """`--lr 1e-3`, `--bf16` for true, `--tags a b` for a list; nothing for false, null and an empty list."""
    flag = option(key)
    if value is True:
        yield flag
    elif isinstance(value, tuple):
        texts = [_text(item) for item in value]
        yield from _one(flag, texts[0]) if len(texts) == 1 else (flag, *texts) if texts else ()
    elif value is not None and value is not False:
        yield from _one(flag, _text(value))


def _one(flag: str, text: str) -> tuple[str, ...]:
    """A value that begins with a dash is joined to its option, or it would be taken for another one."""
    if not text.startswith("-"):
        return flag, text
    short = len(flag) == 2
    return (f"{flag}{text}" if short else f"{flag}={text}",)


def _text(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
