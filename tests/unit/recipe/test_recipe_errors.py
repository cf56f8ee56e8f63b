"""Every mistake at once, each with its place, the full path of the key, what was given, and a hint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import ExitCode, Problem, RecipeError
from launcher.recipe.loader import LoadedRecipe, load_recipe

Load = Callable[..., LoadedRecipe]
Fail = Callable[..., list[Problem]]

SIX_MISTAKES = """\
name: demo
model:
  name: mlp
  hiden: 64
data:
  name: synthetic
  global_batch_size: 0
train:
  untill: 8 epochs
  until: 8 epoch s
  optimizer:
    lr: fast
    lr: 1e-3
tracking:
  tensorboard: yes
"""

SIX_PROBLEMS = """\
a.yaml:4:3: model.hiden: `mlp` has no such option
    hint: did you mean 'hidden'? (in_features, hidden, layers, classes, dropout, inplace)
a.yaml:7:22: data.global_batch_size: 0 is not a whole number >= 1
    hint: Samples per optimizer step over all ranks and accumulation; divides by the data-parallel ranks x accumulate.
a.yaml:9:3: unknown key 'untill' in train
    hint: did you mean 'until'?
a.yaml:10:10: train.until: '8 epoch s' is not a length
    hint: write a number and a unit, as in `500 steps`, `8 epochs`
a.yaml:12:9: train.optimizer.lr: 'fast' is not a number
    hint: Learning rate, before the schedule.
a.yaml:13:5: duplicate key 'lr' in train.optimizer: 'fast' at a.yaml:12:5, '1e-3' here
    hint: keep one of the two
a.yaml:15:16: tracking.tensorboard: 'yes' is not true or false
    hint: write true or false; in YAML 1.2 yes, no, on and off are text"""


def test_all_mistakes_are_listed_at_once_by_line(load: Load) -> None:
    with pytest.raises(RecipeError) as caught:
        load(text=SIX_MISTAKES)
    assert str(caught.value) == SIX_PROBLEMS
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("more", "where", "message", "hint"),
    [
        ("learning_rate: 1", "7:1", "unknown key 'learning_rate'", "here it is 'train.optimizer.lr'"),
        ("lr: 1", "7:1", "unknown key 'lr'", "belongs under train.optimizer"),
        ("num-epochs: 3", "7:1", "unknown key 'num-epochs'", "here it is 'train.until'"),
        ("until: 3 epochs", "7:1", "unknown key 'until'", "belongs under train or limits"),
        ("threads: 3", "7:1", "unknown key 'threads'", "belongs under resources"),
        ("batch_size: 3", "7:1", "unknown key 'batch_size'", "here it is 'data.global_batch_size'"),
        ("hidden: 3", "7:1", "unknown key 'hidden'", "belongs under model"),
        ("Resources: {}", "7:1", "unknown key 'Resources'", "did you mean 'resources'?"),
        ("resources: {gpus: 2}", "7:13", "unknown key 'gpus' in resources", "here it is 'resources.nproc_per_node'"),
        ("resources: {nproc-per-node: 2}", "7:13", "unknown key 'nproc-per-node' in resources",
         "did you mean 'nproc_per_node'?"),
        ("slurm: {nodelist: n1}", "7:9", "unknown key 'nodelist' in slurm",
         "an option of sbatch: use slurm.sbatch.nodelist"),
        ("slurm: {job_name: x}", "7:9", "unknown key 'job_name' in slurm", "an option of sbatch: use name, or --name"),
        ("slurm: {tme: 4}", "7:9", "unknown key 'tme' in slurm", "did you mean 'time'?"),
        ("resources: {timeout: 5m}", "7:13", "unknown key 'timeout' in resources", "belongs under network"),
        ("tracking: {wandb: {modus: auto}}", "7:20", "unknown key 'modus' in tracking.wandb", "did you mean 'mode'?"),
        ("faults: {zzz: 1}", "7:10", "unknown key 'zzz' in faults",
         "valid names: grace, hang_timeout, max_restarts, max_skips, on_hang, on_nan, preflight, rescue"),
        ("persistent_workers: true", "7:1", "unknown key 'persistent_workers'",
         "not needed: loader processes live as long as the training"),
        ("fsdp: true", "7:1", "unknown key 'fsdp'", "parallelism: {strategy: fsdp}"),
        ("tp: 2", "7:1", "unknown key 'tp'", "belongs under parallelism"),
        ("gradient_clip_val: 1.0", "7:1", "unknown key 'gradient_clip_val'", "here it is 'train.clip_norm'"),
        ("mixed_precision: fp16", "7:1", "unknown key 'mixed_precision'", "here it is 'train.precision'"),
        ("fp8: true", "7:1", "unknown key 'fp8'", "there is no fp8 here: train.precision is fp32, tf32, bf16 or fp16"),
        ("resources: {num_workers: 2}", "7:13", "unknown key 'num_workers' in resources",
         "here it is 'data.loader_workers'"),
        ("parallelism: {name: ddp}", "7:15", "parallelism.name: `ddp` has no such option",
         "did you mean 'strategy'?"),
    ],
)  # fmt: skip
def test_unknown_and_misplaced_keys(fail: Fail, more: str, where: str, message: str, hint: str) -> None:
    """F004"""
    (problem,) = fail(more=f"\n{more}\n")
    assert (problem.where, problem.message, problem.hint) == (f"a.yaml:{where}", message, hint)


def test_misspelt_option_of_the_optimizer(fail: Fail) -> None:
    """F004"""
    (problem,) = fail("train.optimizer.wegiht_decay=0.1")
    assert problem.where == "train.optimizer.wegiht_decay=0.1"
    assert problem.message == "train.optimizer.wegiht_decay: `adamw` has no such option"
    assert problem.hint == "did you mean 'weight_decay'? (lr, weight_decay, beta1, beta2, eps)"


def test_key_of_another_section_under_a_named_one(fail: Fail) -> None:
    """F004"""
    (problem,) = fail("data.lr=0.1")
    assert problem.message == "data.lr: `synthetic` has no such option"
    assert problem.hint == "belongs under train.optimizer"


def test_unknown_key_in_an_override_is_the_same_error(fail: Fail) -> None:
    """F004"""
    (problem,) = fail("train.untill=3 epochs")
    assert str(problem) == (
        "train.untill=3 epochs: unknown key 'untill' in train\n    hint: did you mean 'until'?"
    )  # fmt: skip


def test_the_free_section_takes_anything(load: Load) -> None:
    """F004"""
    recipe = load(more="extra: {notes: [a, {b: 1}], lr: 1e-3, on: yes}\n").recipe
    assert recipe.extra == {"notes": ["a", {"b": 1}], "lr": 0.001, "on": "yes"}


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("resources.nodes=0", "resources.nodes: 0 is not a whole number from 1 to 10000 or a range `MIN:MAX`", ""),
        ("resources.nodes=4:1", "resources.nodes: 4:1 begins above its end", "write MIN:MAX, as in `1:4`"),
        ("resources.nodes=0:2", "resources.nodes: 0:2 begins at 0", "a run needs at least one node: `1:2`"),
        ("resources.nodes=1:20000", "resources.nodes: 1:20000 ends above 10000, the most that a run may have", ""),
        ("resources.nodes=1:", "resources.nodes: '1:' is not a whole number from 1 to 10000 or a range `MIN:MAX`", ""),
        (
            "resources.nproc_per_node=2.5",
            "resources.nproc_per_node: 2.5 is not a whole number from 1 to 1024 or auto",
            "",
        ),
        ("resources.device=gpu", "resources.device: 'gpu' is not one of auto, cpu, cuda, cuda:N", "mean 'cuda'?"),
        ("resources.device=cuda:", "resources.device: 'cuda:' is not one of auto, cpu, cuda, cuda:N", "'cuda'"),
        ("resources.device=mps", "resources.device: 'mps' is not one of auto, cpu, cuda, cuda:N", "cuda = one GPU"),
        ("network.master_port=80", "network.master_port: 80 is not a whole number from 1024 to 65535 or auto", ""),
        ("network.timeout=600", "network.timeout: '600' is not a duration", "write a number and a unit"),
        ("network.timeout=0s", "network.timeout: '0s' is not more than 0", ""),
        ("faults.grace=soon", "faults.grace: 'soon' is not a duration (`30s`, `10m`, `1h30m`) or auto", ""),
        ("train.until=0 steps", "train.until: '0 steps' is not more than 0", ""),
        ("train.until=1.5 steps", "train.until: '1.5 steps' is not a whole number of steps", ""),
        ("checkpoint.every=0 epochs", "checkpoint.every: '0 epochs' is not more than 0", ""),
        ("checkpoint.best=accuracy", "checkpoint.best: 'accuracy' does not fit", "`eval/accuracy max`"),
        ("name=a b", "name: 'a b' does not fit", "letters, digits"),
        ("model=mlp", "model: 'mlp' is not a section", "write `model: {name: mlp}`"),
        ("parallelism=ddp", "parallelism: 'ddp' is not a section", "write `parallelism: {strategy: ddp}`"),
        ("tracking.wandb=off", "tracking.wandb: 'off' is not a section", "its keys: mode, project"),
        ("tracking.wandb.tags=a", "tracking.wandb.tags: 'a' is not a list `[a, b]`", "write [a]"),
        ("tracking.wandb.tags=[a, null]", "tracking.wandb.tags.1: null is not text", "quote it"),
        ("env.A={run_dir}", "env.A: a section is not text", "quote it where text is meant"),
        ("train.seed=[1]", "train.seed: a list is not a whole number from 0 to 9223372036854775807", ""),
        ("train.seed={a: 1}", "train.seed: a section is not a whole number from 0 to 9223372036854775807", ""),
        ("model.hidden=wide", "model.hidden: 'wide' is not a whole number", "Width of each hidden layer."),
        ("model.hidden=1.5", "model.hidden: 1.5 is not a whole number", ""),
        ("train.optimizer.lr=null", "train.optimizer.lr: null is not a number", ""),
        ("train.optimizer.lr=[1]", "train.optimizer.lr: a list is not a number", ""),
        ("train.optimizer={name: sgd, nesterov: on}", "train.optimizer.nesterov: 'on' is not true or false", ""),
        ("model.name=mpl", "model.name: there is no model 'mpl'", "did you mean 'mlp'? (convnet, "),
        ("parallelism.strategy=dpp", "parallelism.strategy: there is no strategy 'dpp'", "did you mean 'ddp'?"),
        ("parallelism.strategy=tp", "parallelism.strategy: there is no strategy 'tp'", "tp is a degree: {strategy: "),
        ("parallelism.strategy=pipeline", "parallelism.strategy: there is no strategy 'pipeline'", "pp is a degree"),
        ("parallelism.fsdp=true", "parallelism.fsdp: true is not a whole number >= 1 or auto", "strategy: fsdp"),
        ("train.schedule.name=cos", "train.schedule.name: there is no schedule 'cos'", "cosine"),
        ("foo", "is not KEY=VALUE", ""),
        ("a..b=1", "is not KEY=VALUE", ""),
        ("extends=b.yaml", "extends: is only read from the recipe file", ""),
        ("env={a: 1", "not valid YAML: expected ',' or '}', but got '<stream end>'", "a bracket or brace"),
    ],
)
def test_wrong_values(fail: Fail, override: str, message: str, hint: str) -> None:
    (problem,) = fail(override)
    assert problem.where == override
    assert problem.message == message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: a\n", "nothing to run: there is no model, data and train, and no script", "or a script"),
        ("name: a\nmodel: {name: mlp}\n", "data and train are missing, beside model", ""),
        ("name: a\nmodel: {name: mlp}\ntrain: {until: 1 steps}\n", "data is missing, beside model, train", ""),
        ("model: {name: mlp}\ndata: {name: synthetic, global_batch_size: 1}\ntrain: {until: 1 steps}\n",
         "name is missing", "First part of the run id"),
    ],
)  # fmt: skip
def test_what_a_recipe_needs(fail: Fail, text: str, message: str, hint: str) -> None:
    (problem,) = fail(text=text)
    assert problem.where == "a.yaml:1:1"
    assert problem.message == message
    assert hint in problem.hint


def test_missing_keys_point_to_their_section(fail: Fail) -> None:
    problems = fail(text="name: a\nmodel: {hidden: 3}\ndata:\n  name: synthetic\ntrain:\n  seed: 1\n")
    assert [(p.where, p.message) for p in problems] == [
        ("a.yaml:2:1", "model.name is missing"),
        ("a.yaml:3:1", "data.global_batch_size is missing"),
        ("a.yaml:5:1", "train.until is missing"),
    ]


def test_a_model_or_a_dataset_is_named_or_a_function_of_the_user_s_own(fail: Fail, load: Load) -> None:
    (problem,) = fail("model.target=mine.nets:small")
    assert problem.message == "model.target: 'mine.nets:small', and model.name is 'mlp' (a.yaml:2:15)"
    assert "'model={target: mine.nets:small}' replaces the section" in problem.hint
    (problem,) = fail("data={global_batch_size: 8}")
    assert problem.message == "data.name is missing"
    assert problem.hint.startswith("one of ")
    assert "mnist, " in problem.hint
    assert "`target: package.module:function`" in problem.hint


def test_script_keys_with_a_model(fail: Fail) -> None:
    problems = fail(more="args: [a]\nresume: self\npreload: true\n")
    assert [p.where for p in problems] == ["a.yaml:6:1", "a.yaml:7:1", "a.yaml:8:1"]
    assert problems[0].message == "args: only a script has args, and this recipe trains a model"


def test_script_and_model_together(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    problems = fail(more="script: t.py\ncheckpoint: {keep: 1}\n")
    assert [p.message.split(":")[0] for p in problems] == ["model", "data", "train", "checkpoint"]
    assert "a.yaml:6:9" in problems[0].message


def test_script_that_is_not_there(fail: Fail) -> None:
    (problem,) = fail(text="name: a\nscript: nowhere.py\n")
    assert problem.where == "a.yaml:2:9"
    assert problem.message.startswith("script: there is no such file: /")


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"", "a.yaml:1:1", "is empty"),
        (b"# nothing\n", "a.yaml:1:1", "is empty"),
        (b"just words\n", "a.yaml:1:1", "is not a recipe: it has no keys"),
        (b"- a\n- b\n", "a.yaml:1:1", "is not a recipe: it has no keys"),
        (b"name: a\ntrain:\n\tuntil: 1\n", "a.yaml:3:1", "not valid YAML: found character '\\t'"),
        (b"name: a\n  model: b\n", "a.yaml:2:8", "not valid YAML: mapping values are not allowed here"),
        (b"name: [a, b\n", "a.yaml:1:11", "not valid YAML: expected ',' or ']'"),
        (b"name: a\n---\nname: b\n", "a.yaml:2:1", "not valid YAML: but found another document"),
        (b"name: caf\xe9\n", "a.yaml:1:10", "is not UTF-8: byte 0xe9"),
        (b"a: 1\nname: \x07\n", "a.yaml:2:7", "character '\\x07' is not allowed in YAML"),
        (b"name: *nowhere\n", "a.yaml:1:7", "not valid YAML: found undefined alias 'nowhere'"),
        (b"a: " + b"[" * 600, "a.yaml:1:1", "nested too deeply to be read"),
        (b"extra: &a [*a]\n", "a.yaml:1:8", "nested deeper than 40 levels"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, monkeypatch, content: bytes, where: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("a.yaml"))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.message.startswith(message)


def test_anchors_that_multiply_without_bound_are_refused(fail: Fail) -> None:
    lines = ["extra:", "  a0: &a0 [x, x]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (problem,) = fail(more="\n".join(lines) + "\n")
    assert "more than 50000 values" in problem.message


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for name in ("mnist.yaml", "sub/mnist.yaml", "train.py"):
        Path(name).touch()
    expected = {
        "mnits.yaml": ("there is no such file", "did you mean 'mnist.yaml'?"),
        "sub/mnits.yaml": ("there is no such file", "did you mean 'sub/mnist.yaml'?"),
        "nowhere/a.yaml": ("there is no such file", "there is no folder nowhere"),
        ".": ("is a folder, not a recipe", "it holds mnist.yaml"),
        "train.py": ("is a script, not a recipe", "`launch SCRIPT.py -- arguments` runs it as it is"),
    }
    for path, (message, hint) in expected.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(Path(path))
        assert [(p.where, p.message, p.hint) for p in caught.value.problems] == [(path, message, hint)]


def test_tags_and_merge_keys_are_refused(fail: Fail) -> None:
    problems = fail(more="extra:\n  a: !!python/name:os.system x\n  b: &b {c: 1}\n  d:\n    <<: *b\n  e: !x {}\n")
    assert [(p.where, p.message) for p in problems] == [
        ("a.yaml:7:6", "extra.a: the tag !!python/name:os.system has no meaning here"),
        ("a.yaml:10:5", "`<<` is not part of YAML 1.2"),
        ("a.yaml:11:6", "extra.e: the tag !x has no meaning here"),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden=0", "model.hidden: 0 is not a whole number >= 1"),
        ("model.layers=-1", "model.layers: -1 is not a whole number >= 0"),
        ("model.dropout=1", "model.dropout: 1 is not a number >= 0 and < 1"),
        ("train.optimizer.lr=-1e-3", "train.optimizer.lr: -1e-3 is not a number >= 0"),
        ("data.samples=0", "data.samples: 0 is not a whole number >= 1"),
    ],
)
def test_numbers_of_options_have_bounds(fail: Fail, override: str, message: str) -> None:
    (problem,) = fail(override)
    assert problem.message == message
