"""What a recipe gives a script arrives as it was written, on every way to a worker."""

from __future__ import annotations

import json
import os
import signal
from argparse import ArgumentParser
from pathlib import Path

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

SAYS = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
HOSTILE = (
    *(
        "a b",
        "it's",
        '72" tall',
        '--x={"a":[1]}',
        "$HOME",
        "*",
        "",
        "one\ntwo",
        "ü 漢 \U0001f600",
        "-x",
        "--",
        "\\",
        "`id`",
    ),
    *("{x}", "${HOME}", "${oc.env:HOME}", "%s", "#", "~", "!", "\t", "a=b", "null", "1e3", "true"),
)


def test_arguments_of_a_list_a_mapping_and_a_command_line_arrive_unchanged(
    launch: Launch, recipe: Recipe, tmp_path: Path
) -> None:
    """F056: spaces, quotes, JSON, dollars, nothing, newlines, dashes; forked, fresh, and below torchrun."""
    in_yaml = [text.replace("${", "\\${") for text in HOSTILE]
    named = {f"x{number}": text for number, text in enumerate(HOSTILE) if text != "--"}  # which argparse throws away
    mapping = {name: text.replace("${", "\\${") for name, text in named.items()}
    listed = recipe(SAYS, name="listed", nproc=1, args=in_yaml)
    mapped = recipe(SAYS, name="mapped", nproc=1, args={**mapping, "on": True, "off": False}, preload=False)
    runs = {
        "forked": launch(listed),
        "below torchrun": launch(listed, env={"LAUNCH_ENGINE": "torchrun"}),
        "mapping": launch(mapped, "args.lr=1_0e-4"),
        "command line": launch(tmp_path / "listed.py", "--nproc-per-node", "1", "--", *HOSTILE),
    }
    seen = {}
    for name, run in runs.items():
        assert run.wait() == 0, run.text
        seen[name] = json.loads(run.log(0))
    assert seen["forked"] == seen["below torchrun"] == seen["command line"] == list(HOSTILE)
    parser = ArgumentParser()
    for name in named:
        parser.add_argument(f"--{name}")
    parser.add_argument("--on", action="store_true")
    parser.add_argument("--lr")
    read = vars(parser.parse_args(seen["mapping"]))
    assert read == {**named, "on": True, "lr": "1_0e-4"}


def test_a_restart_gets_the_number_of_its_attempt_and_the_newest_of_the_scripts_own_checkpoints(
    launch: Launch, recipe: Recipe
) -> None:
    """F056, and DESIGN section 6: `resume: {newest, args}`."""
    source = (
        f"{SAYS}import pathlib, toy\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "if toy.ATTEMPT == 1:\n"
        "    for step in (90, 100):\n"
        "        (out / f'checkpoint-{step}').mkdir(parents=True)\n"
        "        (out / f'checkpoint-{step}' / 'state').touch()\n"
        "    toy.mark('saved')\n"
        "    toy.wait_for('never')\n"
    )
    run = launch(
        recipe(
            source,
            nproc=1,
            args=["{run_dir}/out", "{attempt}", "{{attempt}}", "{nodes}x{nproc}"],
            resume={"newest": "{run_dir}/out/checkpoint-*", "args": {"from": "{newest}", "-n": "{attempt}"}},
        )
    )
    os.kill(run.wait_for_marks("saved", ranks=1)[0], signal.SIGKILL)
    assert run.wait() == 0, run.text
    out = str(run.run.path / "out")
    assert json.loads(run.log(0).splitlines()[0]) == [out, "1", "{attempt}", "1x1"]
    again = json.loads(run.log(0, attempt=2).splitlines()[0])
    assert again == [out, "2", "{attempt}", "1x1", "--from", f"{out}/checkpoint-100", "-n", "2"]
