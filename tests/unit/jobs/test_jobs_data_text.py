from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.data.base import Data, DataError
from jobs.data.text import text
from jobs.data.windows import TokenWindows


def make_text(path: Path | str, tmp_path: Path, **options: Any) -> Data:
    source = text(path=str(path), cache=str(tmp_path / "cache"), **options)
    source.prepare()
    assert source.is_ready()
    return source.load()


def all_inputs(samples: Any) -> bytes:
    return bytes(torch.cat([samples[k][0] for k in range(len(samples))]).tolist())


def test_windows_lie_end_to_end_and_targets_are_the_next_tokens() -> None:
    samples = TokenWindows(np.arange(14, dtype=np.uint16), 4)
    assert [[part.tolist() for part in samples[k]] for k in range(len(samples))] == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[4, 5, 6, 7], [5, 6, 7, 8]],
        [[8, 9, 10, 11], [9, 10, 11, 12]],
    ]
    assert len(TokenWindows(np.arange(13, dtype=np.uint16), 4)) == 3
    assert len(TokenWindows(np.arange(4, dtype=np.uint16), 4)) == 0


def test_the_bytes_of_all_files_are_one_row_of_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_bytes("zwölf".encode())
    (folder / "a.txt").write_bytes(b"ten eleven ")
    (folder / "more" / "c.md").write_bytes(b"#" * 200)
    (folder / ".git").mkdir()
    (folder / ".git" / "d.txt").write_bytes(b"x" * 500)
    data = make_text(folder, tmp_path, context=4, pattern="*.txt", eval_share=0)
    assert all_inputs(data.train) == b"ten eleven \0zwo\xcc"[:12] + "zwölf".encode()[:4]
    assert data.evaluation is None
    assert 200 < len(all_inputs(make_text(folder, tmp_path, context=4, eval_share=0).train)) < 300
    assert len(make_text(f"{folder}/**/*.md", tmp_path, context=50, eval_share=0).train) == 4
    assert len(make_text(folder / "a.txt", tmp_path, context=2, eval_share=0).train) == 5


def test_the_last_share_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"t" * 800 + b"e" * 199)
    data = make_text(tmp_path / "a.txt", tmp_path, context=10, eval_share=0.2)
    assert data.evaluation is not None
    assert set(all_inputs(data.train)) == {ord("t")}
    assert set(all_inputs(data.evaluation)) == {ord("e")}


def test_a_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "</s>": 1, **{f"w{k}": k + 2 for k in range(300)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_text("w1 w299\nw7 other w0 ")
    data = make_text(tmp_path / "texts", tmp_path, context=5, eval_share=0, tokenizer=str(tmp_path))
    assert data.train[0][0].tolist() == [3, 301, 9, 0, 2]
    assert data.train[1][0].tolist() == [1, 3, 301, 9, 0]
    assert json.loads(next((tmp_path / "cache").rglob("tokens.json")).read_text())["vocabulary"] == 302


def test_text_that_has_changed_is_prepared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"old " * 50)
    source = text(path=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"), context=4, eval_share=0)
    source.prepare()
    before = source.load()
    (tmp_path / "a.txt").write_bytes(b"newer" * 50)
    assert not source.is_ready()
    capsys.readouterr()
    source.prepare()
    assert "has changed since its tokens were made" in capsys.readouterr().out
    assert all_inputs(source.load().train)[:5] == b"newer"
    assert all_inputs(before.train)[:4] == b"old "  # who has them open goes on
    source.prepare()
    assert capsys.readouterr().out == ""


def test_the_standard_library_is_found_without_its_tests() -> None:
    files = text(path="stdlib").files()
    assert any(path.name == "argparse.py" for path in files)
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)
    assert not any(path.name == "test_argparse.py" for path in files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.txt"}, r"data.path: there is no /.*/nowhere.txt"),
        ({"path": "."}, r"data.path: there are no files like \*.xyz in"),
        ({"path": "a.txt", "context": 100}, r"data.context: 100 tokens, and a.txt has 4 in all"),
        ({"path": "a.txt", "tokenizer": "none.json"}, r"data.tokenizer: there is no .*none.json"),
        ({"path": "a.txt", "tokenizer": "a.txt"}, r"data.tokenizer: a.txt is no tokenizer of Hugging Face"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"abc")
    source = text(cache=str(tmp_path / "cache"), pattern="*.xyz", **options)

    def make() -> Data:
        source.prepare()
        return source.load()

    with pytest.raises(DataError, match=message):
        make()
