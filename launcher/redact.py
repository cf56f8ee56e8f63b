"""Secrets are known by their names, and their values are in nothing that is written.

Whatever ends in a file or on a screen goes through a `Redactor`: it knows the values of the secrets in an environment
and replaces them by `***NAME***`. Standard library only, and without an import of ours: the control plane, the agent
and, by its path, the wrapper in the worker use it.

A value counts as a secret if its variable is named in the recipe's `secrets:`, or has a name like WANDB_API_KEY, or is
a password in a URL or in ~/.netrc; and if it has at least eight characters. Below that, and for a plain word or number
that nobody named (`POSTGRES_PASSWORD=password`), the replacement would eat words of every log and say more than it
hides.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

SECRET_ENDINGS = (
    "_API_KEY",
    "_ACCESS_KEY",
    "_SECRET_KEY",
    "_PRIVATE_KEY",
    "_TOKEN",
    "_SECRET",
    "_PASSWORD",
    "_PASSWD",
    "_PASSPHRASE",
    "_CREDENTIALS",
)
MIN_LENGTH = 8
"""A shorter value is not replaced."""
NAMES_VARIABLE = "LAUNCH_SECRETS"
"""Names of the variables that the recipe calls secret, for the processes of a worker."""

_WORD_LENGTH = 16
_MIN_LINE_LENGTH = 16
_URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/:@\s]*:([^/@\s]+)@")
_NETRC_PASSWORD = re.compile(r"\bpassword\s+(\S+)")

_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: `WANDB_API_KEY`, `hf_token`, `password`."""
    upper = name.upper().replace("-", "_")
    return upper.endswith(SECRET_ENDINGS) or f"_{upper}" in SECRET_ENDINGS


def remember(names: Iterable[str]) -> None:
    """Count these variables as secrets in this process, and in those that are forked from it."""
    _remembered.update(names)


def own() -> Redactor:
    """The redactor of this process's environment as it is now."""
    names = {*_remembered, *filter(None, os.environ.get(NAMES_VARIABLE, "").split(","))}
    return _made(frozenset(known_secrets(os.environ, names)))


def known_secrets(environment: Mapping[str, str], names: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Name and value of each secret of an environment, of a login in its .netrc too."""
    named = frozenset(names)
    for name, value in environment.items():
        if name in named:
            if len(value) >= MIN_LENGTH:
                yield name, value
        elif is_secret_name(name) and _is_telling(value) and not _is_path(value):
            yield name, value
        elif "://" in value:
            yield from ((name, found) for found in _URL_PASSWORD.findall(value) if _is_telling(found))
    yield from (("NETRC", found) for found in _netrc_passwords(environment) if _is_telling(found))


class Redactor:
    """Replaces the values of secrets, and what JSON, URLs and base64 make of them."""

    def __init__(self, secrets: Iterable[tuple[str, str]]) -> None:
        forms: dict[bytes, bytes] = {}
        for name, value in sorted(secrets):
            for form in _forms(value):
                forms.setdefault(form, f"***{name}***".encode())
        # The longest first: one value may be the beginning of another.
        self._forms = sorted(forms.items(), key=lambda item: -len(item[0]))
        self.longest_bytes = max(map(len, forms), default=0)
        """Of what is looked for: text that is cut into pieces overlaps by this much."""

    def __bool__(self) -> bool:
        return bool(self._forms)

    def data(self, data: bytes) -> bytes:
        """Without secrets. Each is looked for on its own: that is many times faster than one expression for all."""
        for form, mark in self._forms:
            if form in data:
                data = data.replace(form, mark)
        return data

    def text(self, text: str) -> str:
        """Without secrets."""
        if not self._forms:
            return text
        return self.data(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def document(self, value: Any) -> Any:
        """A JSON value without secrets, in its keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.document(key): self.document(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.document(item) for item in value]
        return value

    def found_in(self, text: str) -> str | None:
        """The name of a secret whose value is in a text."""
        data = text.encode("utf-8", "surrogatepass")
        return next((mark.strip(b"*").decode() for form, mark in self._forms if form in data), None)


class RedactedStream(io.TextIOBase):
    """Standard output or error of a process of ours: what a traceback shows is redacted too."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str) -> int:
        """Write through."""
        data = memoryview(own().text(text).encode("utf-8", "backslashreplace"))
        while data:
            data = data[os.write(self._fd, data) :]
        return len(text)

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd


@functools.lru_cache(maxsize=8)
def _made(secrets: frozenset[tuple[str, str]]) -> Redactor:
    return Redactor(secrets)


def _is_telling(value: str) -> bool:
    """Long enough, and no single word or number that stands in logs anyway."""
    plain = value.isalpha() or value.isdigit()
    return len(value) >= (_WORD_LENGTH if plain else MIN_LENGTH)


def _is_path(value: str) -> bool:
    """A file with the secret in it: GOOGLE_APPLICATION_CREDENTIALS."""
    return value.startswith(("/", "~")) and "\0" not in value and os.path.exists(os.path.expanduser(value))  # noqa: PTH110, PTH111


def _netrc_passwords(environment: Mapping[str, str]) -> tuple[str, ...]:
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", ""), ".netrc")  # noqa: PTH118
    return _read_netrc(path) if os.path.isabs(path) else ()  # noqa: PTH117


@functools.lru_cache(maxsize=8)
def _read_netrc(path: str) -> tuple[str, ...]:
    try:
        return tuple(_NETRC_PASSWORD.findall(Path(path).read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return ()


def _forms(value: str) -> Iterator[bytes]:
    """The value, its longer lines, and what usual encodings make of them."""
    lines = [line.strip() for line in value.splitlines()]
    for text in {value, *(line for line in lines if len(line) >= _MIN_LINE_LENGTH)}:
        raw = text.encode("utf-8", "surrogateescape")
        yield raw
        for written in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]):
            yield written.encode("utf-8", "surrogateescape")
        for escaped in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
            yield escaped.encode()
        for offset in range(3):
            yield from _base64_forms(raw, offset)


def _base64_forms(raw: bytes, offset: int) -> Iterator[bytes]:
    """The characters that base64 makes of these bytes alone, `offset` bytes after a multiple of three."""
    text = base64.b64encode(bytes(offset) + raw)
    begin, end = (offset * 8 + 5) // 6, (offset + len(raw)) * 8 // 6
    yield text[begin:end]
    yield text[begin:end].translate(bytes.maketrans(b"+/", b"-_"))
