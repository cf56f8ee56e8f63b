"""Keys of scripts: what goes together, and secrets, which a recipe never holds (F060)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import Problem, RecipeError
from launcher.recipe.loader import LoadedRecipe, load_recipe, script_recipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]

SCRIPT = "name: ft\nscript: t.py\n"
CANARY = "geheim-0123456789"


@pytest.fixture(autouse=True)
def _script(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()


def test_a_script_behind_a_link_goes_by_the_name_of_the_link(tmp_path: Path) -> None:
    """What is beside the link is found by `__file__`, as under Python; the folders are the real ones."""
    (tmp_path / "link.py").symlink_to("t.py")
    (tmp_path / "folder").symlink_to(".")
    linked = str(tmp_path / "link.py")
    assert script_recipe(tmp_path / "folder" / "link.py", []).recipe.script == linked
    (tmp_path / "r.yaml").write_text("name: ft\nscript: folder/link.py\n")
    assert load_recipe(tmp_path / "r.yaml").recipe.script == linked


@pytest.mark.parametrize(
    ("written", "overrides"),
    [
        (f"env: {{WANDB_API_KEY: {CANARY}}}", []),
        ("env: {HF_TOKEN: x}", []),
        (f"env: {{DB_PASSWORD: {CANARY}, DB_PASSWORD: {CANARY}}}", []),
        (f"env: {{HF_TOKEN: [{CANARY}]}}", []),
        ("env: {HF_TOKEN: '${oc.env:A_SECRET}'}", []),
        (f"args: {{api_key: {CANARY}}}", []),
        (f"args: {{hub-token: {CANARY}}}", []),
        (f"args: {{password: 'a {CANARY}'}}", []),
        (f"args: [--api-key, {CANARY}]", []),
        (f"args: ['--token={CANARY}']", []),
        (f"extra: {{deep: [{{hf_token: {CANARY}}}]}}", []),
        (f"setup: ['export A=1; export HF_TOKEN={CANARY}']", []),
        ("", [f"env.HF_TOKEN={CANARY}"]),
        ("", [f"env={{HF_TOKEN: {CANARY}}}"]),
        ("", [f"env={{HF_TOKEN: {CANARY}"]),
        ("", [f"args.api_key={CANARY}"]),
        ("", [f"args=[--api-key, {CANARY}]"]),
        ("", [f"env.HF_TOKEN.x={CANARY}"]),
        (f"secrets: ['HF_TOKEN={CANARY}']", []),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    fail: Fail, monkeypatch: pytest.MonkeyPatch, written: str, overrides: list[str]
) -> None:
    """F060"""
    monkeypatch.setenv("A_SECRET", CANARY)
    problems = fail(*overrides, text=SCRIPT, more=written)
    assert problems
    assert CANARY not in "".join(map(str, problems))


@pytest.mark.parametrize(
    "key",
    [
        "hf_" + "Ab1" * 10,
        "sk-" + "proj-" + "a1B" * 8,
        "wandb_v1_" + "a1" * 12,
        "ghp_" + "a1B" * 12,
        "AKIA" + "ABCDEFGH12345678",
        "nvapi-" + "a1B" * 10,
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_value_that_looks_like_a_key_is_refused_wherever_it_stands(fail: Fail, key: str) -> None:
    """F060"""
    for more in (f"args: {{x: '{key}'}}", f"env: {{X: 'a {key}'}}", f"tracking: {{wandb: {{mode: '{key}'}}}}"):
        problems = fail(text=SCRIPT, more=more)
        assert any("has the form of a secret key" in problem.message for problem in problems)
        assert key not in "".join(map(str, problems))
    assert key not in "".join(map(str, fail(f"args.x={key}", text=SCRIPT)))
    with pytest.raises(RecipeError) as caught:
        script_recipe(Path("t.py"), ["--x", key])
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        "args: {pad_token: '<pad>', eos_token: endoftext, mask_token: '[MASK]', max_new_tokens: 512, token: true}",
        "args: {tokenizer: bert-base, token_dropout: 0.1, tokens_per_batch: 4096, max_token: 512, secret: null}",
        f"args: {{revision: {'5f0c1c3b7a' * 4}, key: value, keys: [a], token: word}}",
        f"args: [--revision, {'5f0c1c3b7a' * 4}, --token, word, --use_auth_token, --lr, '1']",
        "args: {token_file: /home/ada/token, password: /run/secrets/db, api_key: '{run_dir}/key'}",
        "env: {TOKENIZERS_PARALLELISM: 'false', GOOGLE_APPLICATION_CREDENTIALS: /home/ada/key.json, PAD_TOKEN: x}",
        "env: {HF_TOKEN: ''}",
        "setup: ['export HF_TOKEN=$(cat ~/.hf)', 'export HF_TOKEN=\"$OTHER\"', 'A_TOKEN=`cat x` y', 'HF_HOME=/x y']",
        "args: {text: sk-learn, hf: hf_hub, name: hf_transformers_and_friends}",
    ],
)
def test_what_only_looks_like_one_is_left_alone(load: Load, more: str) -> None:
    load(text=SCRIPT, more=more)


def test_an_argument_of_the_command_line_is_no_place_for_a_secret_either() -> None:
    """F060: it is in the plan, and in /proc/*/cmdline."""
    with pytest.raises(RecipeError, match="the value of api-key is a secret") as caught:
        script_recipe(Path(__file__), ["--api-key", CANARY])
    assert CANARY not in str(caught.value)


def test_a_module_is_a_program_too(load: Load, fail: Fail) -> None:
    recipe = load(text="name: a\nmodule: pkg.train\nargs: {lr: 1}\nresume: self\n").recipe
    assert recipe.is_script
    messages = [str(problem) for problem in fail(text="name: a\nmodule: pkg/train.py\nmodel: {name: mlp}\n")]
    assert "module: 'pkg/train.py' is not the name of a module" in messages[0]
    assert "a file is a `script`" in messages[0]
    assert "model: this recipe runs a module (a.yaml:2:9), which is never combined with model" in messages[1]


def test_an_interpreter_is_found_from_the_recipe_and_its_links_are_kept(load: Load, tmp_path: Path) -> None:
    """A link is how an interpreter finds its environment."""
    binary = tmp_path / "ft/bin/python"
    binary.parent.mkdir(parents=True)
    binary.symlink_to(sys.executable)
    for written in ("ft/bin/python", "ft", "./x/../ft", str(binary)):
        assert load(text=SCRIPT, more=f"python: {written}\n").recipe.python == str(binary)
    recipe = load(text=SCRIPT, more="python: ft\n").recipe
    again = load_recipe(Path("a.yaml"), [f"python={recipe.python}"]).recipe
    assert again == recipe


def test_an_interpreter_that_is_not_there_is_an_error_with_its_place(fail: Fail, tmp_path: Path) -> None:
    (problem,) = fail(text=SCRIPT, more="python: nowhere\n")
    assert problem.where == "a.yaml:3:9"
    assert problem.message == f"python: there is no such file: {tmp_path}/nowhere"


@pytest.mark.parametrize("log", [r"step (\d+)", r"(?:it|step)[ =]([\d,]+)", r'{"step": ([0-9]+)'])
def test_an_expression_with_one_group_finds_the_step(load: Load, log: str) -> None:
    progress = load(
        text=SCRIPT,
        more=f"progress: {{log: {log if log[0] == chr(39) else repr(log)[0:0] + chr(39) + log + chr(39)}}}\n",
    ).recipe.progress
    assert progress is not None


def test_placeholders_are_checked_without_a_plan(fail: Fail) -> None:
    """`launch check` finds them."""
    more = "args:\n  - a\n  - '{newest}'\nresume: {newest: '{attempt}/*', args: {load: x}}\nenv: {A: '{newest}'}\n"
    places = [problem.where for problem in fail(text=SCRIPT, more=more)]
    assert places == ["a.yaml:5:5", "a.yaml:6:18", "a.yaml:6:33", "a.yaml:7:10"]


def test_a_script_that_asks_its_client_needs_no_argument(load: Load, fail: Fail) -> None:
    assert load(text=SCRIPT, more="resume: {newest: 'x-*', args: {}}\n").recipe.resume is not None
    (problem,) = fail(text=SCRIPT, more="resume: {newest: 'x-*'}\n")
    assert "`args: {}`" in problem.hint
    assert "resume_from" in problem.hint


def test_a_timeout_that_would_not_reach_a_script_is_an_error(load: Load, fail: Fail) -> None:
    (problem,) = fail(text=SCRIPT, more="network: {timeout: 8s}\n")
    assert "a script sets the timeout" in problem.message
    assert load(text=SCRIPT, more="network: {timeout: 600s}\n").recipe.is_script, "the record of a run has the default"
    (problem,) = fail(text=SCRIPT, more="network: {timeout: 8}\n")
    assert "duration" in str(problem)


@pytest.mark.parametrize(("key", "value"), [("rescue", "true"), ("on_nan", "skip"), ("max_skips", "3")])
def test_what_only_the_built_in_program_can_do_is_refused_of_a_script(
    load: Load, fail: Fail, key: str, value: str
) -> None:
    (problem,) = fail(text=SCRIPT, more=f"faults: {{{key}: {value}}}\n")
    assert problem.where == "a.yaml:3:10"
    assert problem.message.startswith(f"faults.{key}: ")
    same = "faults: {rescue: false, on_nan: stop, max_skips: 10, hang_timeout: 5m}\n"
    assert load(text=SCRIPT, more=same).recipe.is_script, "the record of a run has the defaults"


@pytest.mark.parametrize("key", ["lr", "epochs", "anything"])
def test_a_key_that_is_an_argument_of_the_script_is_sent_there(fail: Fail, key: str) -> None:
    (problem,) = fail(text=SCRIPT, more=f"{key}: 3\n")
    assert problem.hint == f"an argument of the script is args.{key}"


def test_halves_of_a_character_are_joined_and_a_single_one_is_an_error(load: Load, fail: Fail) -> None:
    assert load(text=SCRIPT, more='args: {x: "\\ud83d\\ude00"}\n').recipe.args == {"x": "\U0001f600"}
    (problem,) = fail(text=SCRIPT, more='args: {x: "\\ud83d"}\n')
    assert problem.message.startswith("args.x: this holds one half of a character")
