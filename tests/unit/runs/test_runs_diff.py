"""How two runs differ, as a pure function of what is known of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs_values import plan

from launcher.planning.code import CodeChanges, CodeFacts
from launcher.planning.plan import EnvVar
from launcher.runs.diff import Row, Side, changed_text, compare


def side(*, code: CodeFacts | None = None, launch: dict[str, Any] | None = None, **fields: Any) -> Side:
    result = fields.pop("result", {})
    made = plan(Path("/runs"), **fields)
    return Side(run_id="a", plan=made, launch=launch or {}, code=code, result=result)


def code(files: dict[str, str], *, snapshot: bool = True) -> CodeFacts:
    return CodeFacts(root="/r", snapshot=snapshot, reason="" if snapshot else "no git", files=files)


def test_equal_runs_do_not_differ() -> None:
    one = side(code=code({"a": "1"}), result={"metrics": {"loss": 0.1}, "weights_sha256": "x"})
    found = compare(one, one)
    assert (found.recipe, found.code, found.environment) == ((), (), ())
    assert not found.files
    assert [row.key for row in found.metrics if row.differs] == []


def test_the_recipe_is_compared_key_by_key() -> None:
    a = side(recipe={"name": "x", "train": {"until": "8 epochs", "optimizer": {"lr": 0.1}}, "env": {}})
    b = side(recipe={"name": "x", "train": {"until": "9 epochs", "optimizer": {}}, "model": {"name": "mlp"}})
    assert compare(a, b).recipe == (
        Row("train.until", "8 epochs", "9 epochs"),
        Row("train.optimizer.lr", 0.1, None),
        Row("model.name", None, "mlp"),
    )


def test_the_code_is_compared_file_by_file_where_both_recorded_the_same() -> None:
    found = compare(side(code=code({"a": "1", "b": "1"})), side(code=code({"a": "2", "c": "1"})))
    assert found.files == CodeChanges(added=("c",), removed=("b",), modified=("a",))
    assert [row.key for row in found.code] == ["sha256"]
    mixed = compare(side(code=code({"a": "1"})), side(code=code({"a": "2"}, snapshot=False)))
    assert not mixed.files
    assert "one of them has a copy" in mixed.files_reason
    assert "not recorded" in compare(side(code=None), side(code=code({}))).files_reason


def test_git_says_commit_and_dirty_tree() -> None:
    clean = side(launch={"git": {"sha": "a" * 40, "dirty": False}})
    dirty = side(launch={"git": {"sha": "a" * 40, "dirty": True}})
    assert compare(clean, dirty).code == (Row("git", "a" * 12, f"{'a' * 12}, dirty"),)


def test_the_environment_names_packages_variables_and_devices_that_differ() -> None:
    variable = EnvVar(name="NCCL_DEBUG", value="INFO", origin="default")
    a = side(launch={"host": "x", "packages": {"numpy": "1", "wandb": "2"}, "versions": {"torch": "2.13"}})
    b = side(launch={"host": "y", "packages": {"numpy": "2", "wandb": "2"}}, device="cuda", env=(variable,))
    rows = {row.key: (row.a, row.b) for row in compare(a, b).environment}
    assert rows == {
        "host": ("x", "y"),
        "torch": ("2.13", None),
        "device": ("cpu", "cuda"),
        "package numpy": ("1", "2"),
        "env NCCL_DEBUG": (None, "INFO"),
    }


def test_metrics_are_all_shown_with_weights_and_times() -> None:
    a = side(result={"metrics": {"eval/accuracy": 0.9}, "time": {"train_s": 2.0}, "weights_sha256": "x"})
    b = side(result={"metrics": {"eval/accuracy": 0.9}, "time": {"train_s": 3.0}, "weights_sha256": "y"})
    assert compare(a, b).metrics == (
        Row("eval/accuracy", 0.9, 0.9),
        Row("time train", 2.0, 3.0),
        Row("weights_sha256", "x", "y"),
    )


def test_the_text_of_changed_files_is_a_bounded_diff(tmp_path: Path, monkeypatch: Any) -> None:
    for folder, files in {"a": {"m.py": "one\n", "b.bin": "\0"}, "b": {"m.py": "two\n", "n.py": "new\n"}}.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    changes = CodeChanges(modified=("m.py",), added=("n.py",), removed=("b.bin",))
    lines = list(changed_text(tmp_path / "a", tmp_path / "b", changes))
    assert lines[0] == "binary, or large: b.bin"
    assert [line for line in lines if line[0] in "+-" and line[1] not in "+-"] == ["-one", "+two", "+new"]
    monkeypatch.setattr("launcher.runs.diff._TEXT_LINES", 2)
    assert list(changed_text(tmp_path / "a", tmp_path / "b", changes))[-1] == "... (more than 2 lines)"
