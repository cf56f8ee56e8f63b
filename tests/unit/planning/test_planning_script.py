"""What a script is given: arguments, placeholders, a place to resume from. The rest arrives as it was written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_values import env, facts, job, plan, script

from launcher.errors import RecipeError
from launcher.placeholders import LATE_NAMES, NAMES, PLAN_NAMES, attempt_argv, fill, fill_plan, names_in
from launcher.planning.arguments import words_of
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan
from launcher.planning.program import plan_worker
from launcher.planning.render import render_plan
from launcher.recipe.dump import dump_yaml
from launcher.recipe.loader import load_recipe

VALUES = {"run_dir": "/r/x", "checkpoint_dir": "/r/x/checkpoints", "nodes": "2", "nproc": "4"}
LATE = {"attempt": "3", "newest": "/r/x/out/checkpoint-100"}
BRACED = [text for name in NAMES for text in (name, f"{{{name}}}", f"{{{{{name}}}}}")]
PIECES = st.sampled_from(["{", "}", '"', "a", *BRACED])


@given(st.lists(PIECES | st.text(max_size=3)).map("".join))
@example("{{{attempt}}}")
@example('{"a":{"b":{attempt}}}')
@example("{{run_dir}}{newest}")
def test_two_steps_fill_a_text_as_one_would(text: str) -> None:
    in_two = attempt_argv([fill_plan(text, VALUES)], [], attempt=3, newest=LATE["newest"])
    assert in_two == (fill(text, {**VALUES, **LATE}),)


@given(st.lists(PIECES | st.text(max_size=3)).map("".join))
def test_text_without_a_name_of_ours_stays(text: str) -> None:
    if not any(f"{{{name}}}" in text for name in NAMES):
        assert fill(text, {**VALUES, **LATE}) == text
        assert not names_in(text)


@pytest.mark.parametrize("folder", ["/runs/{attempt}", "/runs/{{newest}}", "/runs/{run_dir}"])
def test_a_folder_may_have_any_name(folder: str) -> None:
    first = fill_plan("{run_dir}/out", {**VALUES, "run_dir": folder})
    assert attempt_argv([first], [], attempt=1, newest=None) == (f"{folder}/out",)


@pytest.mark.parametrize(
    ("written", "arrives"),
    [
        ("{run_dir}/{nodes}x{nproc}", "/r/x/2x4"),
        ("{{run_dir}}", "{run_dir}"),
        ("{{{run_dir}}}", "{{run_dir}}"),
        ("{ run_dir }", "{ run_dir }"),
        ('{"lr": 1, "d": "{run_dir}"}', '{"lr": 1, "d": "/r/x"}'),
        ("{RUN_DIR} {unknown} {}", "{RUN_DIR} {unknown} {}"),
        ("${run_dir}", "$/r/x"),
    ],
)
def test_exactly_the_known_names_are_filled_in(written: str, arrives: str) -> None:
    assert fill(written, VALUES) == arrives


def test_every_name_is_known_in_one_of_the_two_steps() -> None:
    assert set(VALUES) == set(PLAN_NAMES)
    assert set(LATE) == set(LATE_NAMES)
    assert names_in("{run_dir} {{nodes}} {newest}") == {"run_dir", "newest"}


def test_arguments_of_a_resume_come_only_where_something_was_found() -> None:
    argv, resume = ["--n={attempt}"], ["--from", "{newest}", "{{newest}}"]
    assert attempt_argv(argv, resume, attempt=1, newest=None) == ("--n=1",)
    assert attempt_argv(argv, resume, attempt=2, newest="/c") == ("--n=2", "--from", "/c", "{newest}")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("lr: 2e-4", ["--lr", "2e-4"]),
        ("lr: 1e-05", ["--lr", "1e-05"]),
        ("n: 1_000", ["--n", "1_000"]),
        ("n: 0.10", ["--n", "0.10"]),
        ("n: 007", ["--n", "007"]),
        ("n: 0x1F", ["--n", "0x1F"]),
        ("big: 123456789012345678901234567890", ["--big", "123456789012345678901234567890"]),
        ("bf16: true", ["--bf16"]),
        ("bf16: false", []),
        ("bf16: null", []),
        ("bf16:", []),
        ("bf16: 'true'", ["--bf16", "true"]),
        ("word: no", ["--word", "no"]),
        ("tags: [a, b c, 1e3, true]", ["--tags", "a", "b c", "1e3", "true"]),
        ("tags: [-1]", ["--tags=-1"]),
        ("tags: []", []),
        ('empty: ""', ["--empty", ""]),
        ("offset: -1", ["--offset=-1"]),
        ("text: --x", ["--text=--x"]),
        ("dash: '-'", ["--dash=-"]),
        ("-v: true", ["-v"]),
        ("-k: 5", ["-k", "5"]),
        ("-k: -5", ["-k-5"]),
        ("--kept_as-it.is: x", ["--kept_as-it.is", "x"]),
        ("x: x", ["--x", "x"]),
    ],
)
def test_a_mapping_becomes_words(tmp_path: Path, written: str, words: list[str]) -> None:
    """Numbers as they were written; and the same again from the record of the run."""
    (tmp_path / "t.py").touch()
    path = tmp_path / "a.yaml"
    path.write_text(f"name: a\nscript: t.py\nargs:\n  {written}\n")
    recipe = load_recipe(path).recipe
    assert list(words_of(recipe.args)) == words
    path.write_text(dump_yaml(recipe.model_dump(mode="json", by_alias=True)))
    assert list(words_of(load_recipe(path).recipe.args)) == words


SINGLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(st.dictionaries(st.from_regex(r"[a-z]{2,6}", fullmatch=True), SINGLE, max_size=5))
@example({"x": "a b", "y": "it's", "z": '72" tall', "w": '--x={"a":[1]}', "v": "$HOME", "u": "*", "t": "", "s": "a\nb"})
def test_argparse_reads_every_value_back(args: dict[str, str]) -> None:
    """F056."""
    parser = ArgumentParser()
    for name in args:
        parser.add_argument(f"--{name}")
    if "--" not in args.values():  # which argparse throws away wherever it stands
        assert vars(parser.parse_args(words_of(args))) == args


def test_words_of_a_list_are_the_words() -> None:
    """F056."""
    words = (
        "a b",
        "it's",
        '72" tall',
        '--x={"a":[1]}',
        "$HOME",
        "*",
        "",
        "a\nb",
        "\u6f22",
        "-x",
        "{run_di}",
        "{newst}",
    )
    assert plan(script(args=words), facts()).worker.argv == words


def test_an_override_changes_one_argument_on_top_of_extends_or_replaces_all(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    (tmp_path / "base.yaml").write_text("name: a\nscript: t.py\nargs: {lr: 1e-3, n: 1}\n")
    path = tmp_path / "a.yaml"
    path.write_text("name: b\nextends: base.yaml\nargs: {n: 2, tags: [a]}\n")
    assert words_of(load_recipe(path, ["args.lr=3e-4"]).recipe.args) == ("--lr", "3e-4", "--n", "2", "--tags", "a")
    assert words_of(load_recipe(path, ["args=[--lr, 5]"]).recipe.args) == ("--lr", "5")
    assert words_of(load_recipe(path, ["args={lr: 5}"]).recipe.args) == ("--lr", "5")
    with pytest.raises(RecipeError, match=r"args\.lr=1: args: this is a list, which has no keys"):
        load_recipe(path, ["args=[a]", "args.lr=1"])


def test_the_torchrun_line_gives_the_words_of_the_first_attempt() -> None:
    made = plan(script(args=("{attempt}", "{{newest}}", "it's {nodes}")), facts())
    assert shlex.split(made.torchrun[0])[-3:] == ["1", "{newest}", "it's 1"]


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        ({}, "report"),
        ({"progress": {"log": "step"}}, "report"),
        ({"resume": "self"}, "restart_with_clock"),
        ({"resume": "self", "progress": {"log": "step"}}, "restart"),
        ({"resume": "self", "faults": {"on_hang": "report"}}, "report"),
    ],
)
def test_what_follows_a_hang_of_a_script(fields: dict[str, Any], how: str) -> None:
    assert plan(script(**fields), facts()).limits.on_hang == how


def test_the_pattern_of_a_resume_is_absolute_and_takes_our_folder_literally() -> None:
    resume: dict[str, Any] = {"newest": "{run_dir}/out/c-*", "args": {"load": "{newest}", "n": "{nodes}"}}
    made = make(resume, runs_dir="/data/[a]*")
    assert made.worker.resume_newest == "/data/[[]a][*]/r0/out/c-*"
    assert made.worker.resume_argv == ("--load", "{newest}", "--n", "1")
    assert make({**resume, "newest": "out/c-*"}).worker.resume_newest == "/home/ada/project/out/c-*"
    assert made.resumable


def make(resume: Any, runs_dir: str = "runs") -> Plan:
    from planning_values import loaded

    return make_plan(loaded(script(resume=resume)), facts(), run_id="r0", runs_dir=runs_dir)


@pytest.mark.parametrize(
    ("resume", "adapter", "said"),
    [
        (None, None, "there is no `resume:`"),
        ("self", None, "the script finds its own checkpoint"),
        ("lightning", "lightning", "Lightning has saved"),
        ("hf", "hf", "the Hugging Face Trainer has saved"),
    ],
)
def test_the_dry_run_says_what_a_restart_goes_on_from(resume: Any, adapter: str | None, said: str) -> None:
    made = make(resume)
    assert made.worker.adapter == adapter
    assert made.resumable == (resume is not None)
    assert made.limits.max_restarts == (0 if resume is None else 3)
    assert said in render_plan(made)


def test_variables_of_the_recipe_may_name_the_run_directory_and_those_of_the_environment_are_only_text() -> None:
    recipe = script(env={"HF_HOME": "{run_dir}/hf", "JSON": '{"a": 1}', "NCCL_DEBUG_FILE": "{run_dir}/n.log"})
    seen = env(plan(recipe, facts(environment={"NCCL_TOPO_FILE": "{run_dir}/t"})))
    assert seen["HF_HOME"] == "/home/ada/project/runs/r0/hf"
    assert seen["NCCL_DEBUG_FILE"] == "/home/ada/project/runs/r0/n.log"
    assert (seen["JSON"], seen["NCCL_TOPO_FILE"]) == ('{"a": 1}', "{run_dir}/t")


def test_setup_runs_before_the_torchrun_line_in_the_shell_that_the_agent_uses(tmp_path: Path) -> None:
    recipe = script(setup=('export GREETING="it\'s"', "if true; then\n  export N=2\nfi"), args=("a b",))
    says = 'printf "%s\\n" "$GREETING" "$N" "$OMP_NUM_THREADS" "$@"'
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "torchrun").chmod(0o755)
    (line,) = plan(recipe, facts()).torchrun
    assert "\n" not in line
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, env=path)
    words = ran.stdout.splitlines()
    assert words[:3] == ["it's", "2", "8"]
    assert words[-2:] == ["/home/ada/project/train.py", "a b"]
    failing = plan(script(setup=("false",)), facts()).torchrun[0]
    assert subprocess.run(["bash", "-c", failing], check=False).returncode == 1


def test_secrets_are_names_that_have_to_be_set_and_are_not_ours() -> None:
    recipe = script(secrets=("HF_TOKEN", "HF_TOKEN", "OTHER"))
    made = plan(recipe, facts())
    assert made.secrets == ("HF_TOKEN", "OTHER")
    assert Plan.from_json(made.to_json()) == made
    with pytest.raises(RecipeError, match="OTHER is not set in this environment") as caught:
        plan(recipe, facts(secrets_missing=("OTHER",)))
    assert len(caught.value.problems) == 1
    with pytest.raises(RecipeError, match="RANK is no secret"):
        plan(script(secrets=("RANK",)), facts())


def test_the_built_in_job_takes_no_part_in_this() -> None:
    made = plan(job(), facts())
    assert (made.worker.adapter, made.worker.resume_newest, made.engine) == (None, None, "agent")
    assert plan_worker(job(), folder="/", cwd="/", python="p", fresh=True, placeholders={}).preload is None
    assert json.loads(made.to_json())["secrets"] == []
