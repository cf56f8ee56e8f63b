"""The batch script: what bash and shellcheck say of it, and templates of sites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.planning.batch_script import VARIABLES, ArrayScript, TemplateError, batch_script, shipped_template
from launcher.planning.plan import SbatchFlag
from launcher.shipped import BATCH_TEMPLATE

FLAGS = (
    SbatchFlag(flag="--nodes", value="2", key="resources.nodes"),
    SbatchFlag(flag="--comment", value="it's # odd", key="slurm.sbatch.comment"),
    SbatchFlag(flag="--requeue", value="", key="plan"),
)
ODD = "/runs/my 100% $HOME 'run' \"1\""


def script(
    template: str | None = None,
    *,
    run_dir: str = ODD,
    array: ArrayScript | None = None,
    python: str = "/usr/bin/python3",
) -> str:
    return batch_script(template, run_id="r0", run_dir=run_dir, python=python, flags=FLAGS, array=array)


PLAIN = ODD.replace("$", "")  # of a literal `$` shellcheck asks whether it was meant


@pytest.mark.parametrize("array", [None, ArrayScript(prefix=PLAIN, offset=100)], ids=["one", "array"])
def test_bash_and_shellcheck_have_nothing_to_say(tmp_path: Path, array: ArrayScript | None) -> None:
    file = tmp_path / "batch.sh"
    file.write_text(script(array=array, run_dir=PLAIN))
    subprocess.run(["bash", "-n", file], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_flags_stand_before_the_first_command_and_are_quoted_once() -> None:
    lines = script().splitlines()
    assert lines[2:5] == ["#SBATCH --nodes=2", "#SBATCH --comment='it'\"'\"'s # odd'", "#SBATCH --requeue"]
    assert not any(line.startswith("#SBATCH") for line in lines[5:])


def run(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", **variables}
    )


def test_it_becomes_the_batch_side_with_the_run_directory_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "a $b 'c'"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = run(script(run_dir=str(folder), python=str(python)), SLURM_JOB_ID="7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["--run-dir", str(folder), "--batch"]
    folder.with_name(f"{folder.name}.103").mkdir()
    array = ArrayScript(prefix=str(folder), offset=100)
    done = run(script(python=str(python), array=array), SLURM_ARRAY_TASK_ID="3")
    assert done.stdout.splitlines()[-2] == f"{folder}.103", done.stderr


def test_a_node_without_the_interpreter_or_the_folder_says_so(tmp_path: Path) -> None:
    """F055"""
    done = run(script(python="/nonexistent/python"))
    assert done.returncode == 127
    assert "has no interpreter /nonexistent/python" in done.stderr
    done = run(script(run_dir=str(tmp_path / "gone"), python="/bin/true"))
    assert done.returncode == 3
    assert "gone" in done.stderr


def test_what_a_template_may_use_is_all_used_or_documented() -> None:
    assert BATCH_TEMPLATE.resolve() == Path(__file__).parents[3] / "slurm" / "batch.sh.j2"
    assert "{{ command }}" in shipped_template()
    everything = "\n".join(f"# {{{{ {name} }}}}" for name in VARIABLES)
    assert script(shipped_template().replace("set -u\n", f"{everything}\nset -u\n"))


def test_a_mistake_in_a_template_has_its_line() -> None:
    with pytest.raises(TemplateError) as caught:
        script("#!/bin/bash\n\n#SBATCH {{ partition }}\n")
    assert caught.value.line == 3
    assert "command" in caught.value.hint


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ run_id + 1 }}", "TypeError: "),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{{ flags | nofilter }}", "No filter named 'nofilter'"),
    ],
)
def test_an_expression_of_a_template_that_fails_is_a_mistake_in_it(expression: str, said: str) -> None:
    with pytest.raises(TemplateError) as caught:
        script(f"#!/bin/bash\n{expression}\n")
    assert caught.value.message.startswith(said)
    assert caught.value.line == 2
