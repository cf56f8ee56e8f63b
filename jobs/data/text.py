"""Text of any kind, as a long row of tokens."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.data.base import Data, DataError
from jobs.data.download import cache_folder, locked, part_of
from jobs.data.encoder import Encoder, tokenizer_file
from jobs.data.windows import TokenWindows
from jobs.registry import OptionError, dataset
from launcher import wording

STDLIB = "stdlib"
PATHS = ("path", "tokenizer")
NO_PATHS = ("stdlib",)
"""Both are read by `launch`, which looks for the files before a run begins."""
BOUNDS = {"context": (1, None), "eval_share": (0, 1)}
"""Option -> its least value, and what it stays below. A literal, as the check reads it from here."""
HAS = ({"when": {"tokenizer": None}, "task": "language_modelling", "shape": ("=context",), "classes": 256},)
"""What a sample is, for the check, which reads it from here: `=` names an option."""
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
"""Folders of the standard library that are none of its sources, or long lists of cases."""
_FORMAT = 1


@dataset("text")
def text(
    *,
    path: str,
    pattern: str = "*",
    context: int = 128,
    tokenizer: str | None = None,
    eval_share: float = 0.05,
    cache: str | None = None,
) -> Text:
    """The bytes of any files, or the tokens of a tokenizer, to predict the next from those before it.

    Args:
        path: A file, a folder (with all that is in it, but for hidden files), a pattern (`books/*.txt`), or `stdlib`:
            the sources of Python's own standard library. Relative to the workdir.
        pattern: Names of the files that are taken from a folder, as in `*.py`.
        context: Tokens of a sample.
        tokenizer: A tokenizer.json of Hugging Face, or the folder with it. Without one each byte is a token, of 256.
        eval_share: The share of the tokens, at the end, that is held out.
        cache: Folder of the prepared tokens. Default: launcher/text in the user's cache folder.
    """
    if context < 1:
        raise OptionError(f"data.context: {context} tokens are no sequence; write 1 or more")
    if not 0 <= eval_share < 1:
        raise OptionError(f"data.eval_share: {eval_share} is no share; write 0 to below 1")
    folder = Path(cache).expanduser() if cache else cache_folder() / "text"
    return Text(path, pattern, context, tokenizer_file(tokenizer), eval_share, folder)


@dataclass(frozen=True)
class Text:
    """Files of text, and the folder in which their tokens are kept: one row of numbers, mapped into memory."""

    path: str
    pattern: str
    context: int
    tokenizer: Path | None
    eval_share: float
    home: Path
    task = "language_modelling"

    @property
    def tokens(self) -> Path:
        """The folder of the prepared tokens: `tokens.bin`, and `tokens.json`, which says what they are of."""
        said = json.dumps([_FORMAT, self._absolute(), self.pattern, self.tokenizer and str(self.tokenizer.absolute())])
        return self.home / hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def is_ready(self) -> bool:
        """Whether the tokens of the files are there, as the files are now. Raises DataError where there is no file."""
        record = self._record()
        return record is not None and record["of"] == self._of(self.files())

    def prepare(self) -> None:
        """Make the tokens, where they are not there yet or a file has changed. Raises DataError."""
        files = self.files()
        self.home.mkdir(parents=True, exist_ok=True)
        with locked(self.home):
            if self.is_ready():
                return
            if self._record() is not None:
                print(f"{self.path} has changed since its tokens were made: they are made again", flush=True)
            part = part_of(self.tokens)
            part.mkdir()
            encoder = Encoder(self.tokenizer)
            with (part / "tokens.bin").open("wb") as file:
                count = sum(encoder.write(path, file) for path in files)
                file.flush()
                os.fsync(file.fileno())
            record = {"dtype": encoder.dtype, "count": count, "vocabulary": encoder.vocabulary, "of": self._of(files)}
            (part / "tokens.json").write_text(json.dumps(record), "utf-8")
            old = part_of(self.tokens.with_suffix(".old"))
            if self.tokens.exists():
                self.tokens.rename(old)  # whoever reads it goes on doing so; it is removed with the next that is made
            part.rename(self.tokens)
        print(f"{wording.count(len(files), 'file')} of {self.path}: {count:,} tokens, in {self.tokens}", flush=True)

    def load(self) -> Data:
        """Map the tokens into memory. Raises DataError where they are too few for one sample."""
        record = self._record()
        if record is None:
            raise DataError(f"data.path: the tokens of {self.path} are not in {self.tokens}")
        count = record["count"]
        if count <= self.context:
            raise DataError(f"data.context: {self.context} tokens, and {self.path} has {count} in all")
        tokens = np.memmap(self.tokens / "tokens.bin", dtype=record["dtype"], mode="r", shape=(count,))
        first = count - int(count * self.eval_share)
        held_out = TokenWindows(tokens[first:], self.context)
        train = TokenWindows(tokens[:first], self.context)
        return Data(train, held_out if len(held_out) else None, classes=record["vocabulary"])

    def files(self) -> list[Path]:
        """The files of text, by their names. Raises DataError where there are none."""
        found = sorted(self._found())
        if not found:
            place = self._absolute()
            what = f"are no files like {self.pattern} in" if Path(place).is_dir() else "is no"
            raise DataError(f"data.path: there {what} {place}")
        return found

    def _found(self) -> Iterator[Path]:
        path = Path(self._absolute())
        if self.path == STDLIB:
            for file in path.rglob("*.py"):
                if not set(file.relative_to(path).parts[:-1]) & set(_LEFT_OUT):
                    yield file
        elif path.is_dir():
            yield from (file for file in path.rglob(self.pattern) if file.is_file() and not _hidden(file, path))
        elif path.is_file():
            yield path
        else:
            found = glob.glob(str(path), recursive=True)  # noqa: PTH207 - that one takes no absolute pattern
            yield from (Path(name) for name in found if Path(name).is_file())

    def _absolute(self) -> str:
        if self.path == STDLIB:
            return sysconfig.get_paths()["stdlib"]
        return str(Path(self.path).expanduser().absolute())

    def _of(self, files: list[Path]) -> list[list[Any]]:
        """What the tokens are made of, to notice when it changes."""
        sources = [*files, *([] if self.tokenizer is None else [self.tokenizer])]
        return [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in sources]

    def _record(self) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = json.loads((self.tokens / "tokens.json").read_text("utf-8"))
        except FileNotFoundError:
            return None
        return record


def _hidden(file: Path, folder: Path) -> bool:
    return any(name.startswith(".") or name == "__pycache__" for name in file.relative_to(folder).parts)
