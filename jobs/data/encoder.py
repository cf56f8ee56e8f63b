"""Files of text to numbers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from jobs.data.base import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_FILE = b"\0"
"""After each file of bytes: no text has it."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
"""What tokenizers call the end of a text; the first that one knows stands after each file."""
_COPY_BYTES = 1 << 20
_PIECE_CHARACTERS = 1 << 16
"""A tokenizer is given the text in pieces of about so many characters, each up to the end of a line."""
_PIECES = 64
"""So many at once, on all CPUs."""


class Encoder:
    """Bytes as they are, or what a tokenizer makes of the text."""

    def __init__(self, tokenizer: Path | None) -> None:
        """`tokenizer`: a tokenizer.json. Raises DataError where it cannot be used."""
        self._tokenizer = None if tokenizer is None else _load(tokenizer)
        self.vocabulary = 256 if self._tokenizer is None else self._tokenizer.get_vocab_size()
        self.dtype = "uint8" if self.vocabulary <= 1 << 8 else "uint16" if self.vocabulary <= 1 << 16 else "uint32"

    def write(self, path: Path, file: BinaryIO) -> int:
        """Append the tokens of a text. Returns their number. Raises DataError where it cannot be read."""
        try:
            return self._copy(path, file) if self._tokenizer is None else self._encode(path, file)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.path: {path} cannot be read as text: {error}") from None

    def _copy(self, path: Path, file: BinaryIO) -> int:
        count = 0
        with path.open("rb") as source:
            while chunk := source.read(_COPY_BYTES):
                count += file.write(chunk)
        return count + file.write(END_OF_FILE)

    def _encode(self, path: Path, file: BinaryIO) -> int:
        assert self._tokenizer is not None
        pieces, count = _pieces(path), 0
        while batch := list(islice(pieces, _PIECES)):
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                count += self._append(encoding.ids, file)
        known = (self._tokenizer.token_to_id(name) for name in ENDS)
        end = next((token for token in known if token is not None), None)
        return count + (0 if end is None else self._append([end], file))

    def _append(self, tokens: list[int], file: BinaryIO) -> int:
        file.write(np.array(tokens, dtype=self.dtype).tobytes())
        return len(tokens)


def tokenizer_file(tokenizer: str | None) -> Path | None:
    """The tokenizer.json that is meant: the file itself, or the one in a folder."""
    path = None if tokenizer is None else Path(tokenizer).expanduser()
    return path / "tokenizer.json" if path is not None and path.is_dir() else path


def _load(path: Path) -> Tokenizer:
    if importlib.util.find_spec("tokenizers") is None:
        raise DataError("data.tokenizer: needs the package tokenizers, which is not installed: pip install tokenizers")
    if not path.is_file():
        raise DataError(f"data.tokenizer: there is no {path.absolute()}")
    from tokenizers import Tokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or it warns of every process that is forked later
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - that is the class which the package raises
        raise DataError(f"data.tokenizer: {path} is no tokenizer of Hugging Face: {error}") from None


def _pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as source:
        while piece := source.read(_PIECE_CHARACTERS):
            yield piece + source.readline()
