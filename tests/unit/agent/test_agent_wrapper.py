"""A script under the wrapper behaves as under `python script.py args`, and leaves a record when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import wrapper

LIMIT_S = 60


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    error: dict[str, Any] | None


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run source code as a script under the wrapper."""

    def run_source(source: str, *argv: str, via: Path | None = None) -> Done:
        script = tmp_path / "a script.py"
        script.write_text(source)
        error_file = tmp_path / "logs" / "error.json"
        done = subprocess.run(
            [sys.executable, "-u", "-P", wrapper.__file__, str(via or script), *argv],
            cwd=tmp_path,
            env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        error = json.loads(error_file.read_text()) if error_file.exists() else None
        return Done(done.returncode, done.stdout, done.stderr, error)

    return run_source


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(None)", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit(True)", 1),
        ("import sys; sys.exit(256)", 0),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit('a text')", 1),
        ("raise SystemExit(4)", 4),
        ("exit(5)", 5),
        ("import os; os._exit(7)", 7),
        ("raise ValueError('boom')", 1),
        ("raise KeyboardInterrupt", 130),
        ("1 +", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2),
    ],
)
def test_exit_code(run: Run, source: str, code: int) -> None:
    """F013: as Python gives it (an interrupt as a shell does)."""
    assert run(source).code == code


def test_a_text_given_to_exit_is_printed(run: Run) -> None:
    done = run("import sys; sys.exit('no data: näh')")
    assert done.err == "no data: näh\n"
    assert done.error is None


def test_arguments_arrive_unchanged(run: Run) -> None:
    """F097"""
    argv = ["a b", "it's", '72" tall', '--x={"a":[1]}', "$HOME", "*", "", "two\nlines", "größe", "-v", "--", "a\\b"]
    done = run("import json, sys; print(json.dumps(sys.argv[1:]))", *argv)
    assert json.loads(done.out) == argv


def test_the_script_is_main_and_its_folder_is_first_on_the_path(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'")
    done = run(
        "import sys, sibling\n"
        "print(__name__, sys.argv[0] == __file__, sys.path[0], sibling.NAME)\n"
        "print([p for p in sys.path if 'agent' in p], 'launcher' in sys.modules)"
    )
    script = tmp_path / "a script.py"
    assert done.out.splitlines() == [f"__main__ True {script.parent} sibling", "[] False"]


def test_a_script_behind_a_link_finds_its_siblings(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("NAME = 'sibling'")
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "train.py"
    link.symlink_to(tmp_path / "a script.py")
    assert run("import sibling; print(sibling.NAME)", via=link).out == "sibling\n"


def test_a_launcher_of_the_users_own_is_not_mistaken_for_ours(run: Run, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("MINE = True")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("MINE = True")
    assert run("import launcher, jobs; print(launcher.MINE, jobs.MINE)").out == "True True\n"


class TestFailure:
    def test_the_traceback_begins_in_the_users_file(self, run: Run, tmp_path: Path) -> None:
        done = run("def inner():\n    raise ValueError('boom-2')\n\ninner()\n")
        assert done.err.splitlines()[:2] == [
            "Traceback (most recent call last):",
            f'  File "{tmp_path / "a script.py"}", line 4, in <module>',
        ]
        assert "wrapper.py" not in done.err
        assert "runpy" not in done.err
        assert done.err.endswith("ValueError: boom-2\n")

    def test_the_error_file_has_exception_place_and_traceback(self, run: Run, tmp_path: Path) -> None:
        done = run("def inner():\n    raise ValueError('boom-2')\n\ninner()\n")
        assert done.error is not None
        assert done.error["message"]["message"] == "ValueError: boom-2"
        assert done.error["message"]["extraInfo"]["py_callstack"] == done.err
        assert done.error["exception"] == "ValueError"
        assert done.error["exception_bases"][:2] == ["ValueError", "Exception"]
        assert done.error["place"] == f"{tmp_path / 'a script.py'}:2 in inner"

    def test_an_error_whose_message_says_all_is_shown_without_a_traceback(self, run: Run) -> None:
        source = "class Full(OSError):\n    launch_plain = True\nprint('before')\nraise Full('the disk is full')\n"
        done = run(source)
        assert (done.out, done.err) == ("before\n", "ended by Full: the disk is full\n")
        assert done.error is not None
        assert (done.error["place"], done.error["exception_bases"][1]) == ("", "OSError")
        assert "raise Full" in done.error["message"]["extraInfo"]["py_callstack"], "who looks for it finds it"

    def test_a_syntax_error_is_recorded_too(self, run: Run) -> None:
        done = run("x = = 1\n")
        assert done.error is not None
        assert "SyntaxError" in done.error["exception_bases"]
        assert "x = = 1" in done.err

    def test_what_was_raised_from_what_is_shown(self, run: Run) -> None:
        done = run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('outer') from e\n")
        assert "ZeroDivisionError: division by zero" in done.err
        assert "RuntimeError: outer" in done.err

    def test_a_folder_that_cannot_be_written_costs_the_record_but_not_the_traceback(
        self, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "logs").write_text("a file where the folder should be")
        done = run("raise ValueError('boom')")
        assert done.code == 1
        assert "ValueError: boom" in done.err
        assert "launch: the error file could not be written" in done.err

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("import sys; sys.stdout.close(); raise ValueError('boom')", "ValueError: boom"),
            ("import sys; sys.stdout.close(); sys.stderr.close(); raise ValueError('boom')", "ValueError: boom"),
            ("import sys; sys.stdout = sys.stderr = None; raise ValueError('boom')", "ValueError: boom"),
            ("class Odd(Exception):\n    __str__ = None\nraise Odd", "Odd: <exception str() failed>"),
            ("assert False", "AssertionError"),
            (
                "raise ExceptionGroup('two', [ValueError('a'), ExceptionGroup('in', [KeyError('b')])])",
                "ExceptionGroup: two (2 sub-exceptions)\n  ValueError: a\n"
                "  ExceptionGroup: in (1 sub-exception)\n    KeyError: 'b'",
            ),
        ],
    )
    def test_strange_failures_leave_a_record_too(self, run: Run, source: str, message: str) -> None:
        done = run(source)
        assert done.code == 1
        assert done.error is not None
        assert done.error["message"]["message"] == message

    def test_a_hook_of_the_scripts_own_is_called_in_place_of_the_traceback(self, run: Run) -> None:
        """W&B learns in this way that a run has failed, and Sentry what to report."""
        hook = "import sys\nsys.excepthook = lambda kind, error, trace: print(kind.__name__, error, trace.tb_lineno)\n"
        done = run(f"{hook}raise ValueError('boom')")
        assert (done.code, done.out, done.err) == (1, "ValueError boom 3\n", "")
        assert done.error is not None
        assert "ValueError: boom" in done.error["message"]["extraInfo"]["py_callstack"]

    def test_a_hook_that_fails_hides_nothing(self, run: Run) -> None:
        done = run("import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError('boom')")
        assert done.code == 1
        assert "ZeroDivisionError" in done.err
        assert done.err.endswith("ValueError: boom\n")

    def test_a_handler_that_raises_at_the_end_of_a_child_does_not_disturb_the_record(self, run: Run) -> None:
        """torch's own for loader processes does: the next one dies while the first death is written down."""
        source = (
            "import os, signal, subprocess, traceback\n"
            "def raising(*_):\n    raise RuntimeError('a child has ended')\n"
            "signal.signal(signal.SIGCHLD, raising)\n"
            "format_exception = traceback.format_exception\n"
            "def slow(*args):\n    subprocess.run(['true'])\n    return format_exception(*args)\n"
            "traceback.format_exception = slow\n"
            "raise ValueError('boom')\n"
        )
        done = run(source)
        assert done.error is not None
        assert done.error["message"]["message"] == "ValueError: boom"

    def test_an_exit_without_an_exception_leaves_no_record(self, run: Run) -> None:
        assert run("import os; os._exit(3)").error is None
        assert run("import sys; sys.exit(3)").error is None


class TestEnd:
    """The interpreter is not torn down, so all that a script may count on is done by hand."""

    def test_prints_are_flushed(self, run: Run) -> None:
        assert run("import sys; sys.stdout.write('no line end'); sys.stderr.write('neither')") == Done(
            0, "no line end", "neither", None
        )

    @pytest.mark.parametrize(
        "source",
        [
            "f = open('left', 'w'); f.write('kept')",
            "f = open('left', 'wb'); f.write(b'kept')",
            "f = open('left', 'w+b'); f.write(b'kept')",
            "f = open('left', 'w+'); f.write('kept')",
            "import io; f = io.TextIOWrapper(open('left', 'wb')); f.write('kept')",
        ],
    )
    def test_a_file_left_open_is_flushed(self, run: Run, tmp_path: Path, source: str) -> None:
        assert run(source).code == 0
        assert (tmp_path / "left").read_text() == "kept"

    def test_a_file_left_open_is_flushed_after_an_error_too(self, run: Run, tmp_path: Path) -> None:
        assert run("f = open('left', 'w'); f.write('kept'); raise ValueError('boom')").code == 1
        assert (tmp_path / "left").read_text() == "kept"

    def test_atexit_functions_run_in_reverse_and_see_the_scripts_globals(self, run: Run) -> None:
        source = "import atexit\nNAME = 'x'\natexit.register(lambda: print(1, NAME))\natexit.register(print, 2)\n"
        assert run(source).out == "2\n1 x\n"

    def test_a_thread_is_joined(self, run: Run) -> None:
        source = (
            "import threading\ngo = threading.Event()\n"
            "threading.Thread(target=lambda: (go.wait(), print('from the thread'))).start()\n"
            "threading.Timer(0.1, go.set).start()\nprint('from the script')\n"
        )
        assert run(source).out == "from the script\nfrom the thread\n"

    def test_a_daemon_thread_is_not_waited_for(self, run: Run) -> None:
        assert (
            run("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()").code
            == 0
        )

    def test_a_stdout_that_was_replaced_is_no_trouble(self, run: Run) -> None:
        source = "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='latin-1')\nprint('ok')\n"
        done = run(source)
        assert (done.code, done.out, done.err) == (0, "ok\n", "")

    def test_a_closed_stdout_is_no_trouble(self, run: Run) -> None:
        assert run("import sys; sys.stdout.close()") == Done(0, "", "", None)

    def test_a_stdout_that_was_removed_is_no_trouble(self, run: Run) -> None:
        assert run("import sys; sys.stdout = sys.stderr = None").code == 0

    def test_a_stdout_of_the_scripts_own_is_no_trouble(self, run: Run) -> None:
        tee = "class Tee:\n    write = sys.__stdout__.write\n    flush = sys.__stdout__.flush\n"
        assert run(f"import sys\n{tee}sys.stdout = Tee()\nprint('ok')") == Done(0, "ok\n", "", None)

    def test_an_exit_with_a_text_and_no_stderr(self, run: Run) -> None:
        assert run("import sys; sys.stderr.close(); sys.exit('a text')").code == 1

    def test_an_error_in_an_atexit_function_does_not_change_the_exit_code(self, run: Run) -> None:
        done = run("import atexit; atexit.register(lambda: 1 / 0)")
        assert done.code == 0
        assert "ZeroDivisionError" in done.err

    def test_child_processes_of_multiprocessing_are_seen_out(self, run: Run) -> None:
        source = (
            "import multiprocessing as mp\n"
            "def work(q):\n    q.put('from the child')\n"
            "if __name__ == '__main__':\n"
            "    c = mp.get_context('spawn'); q = c.Queue(); p = c.Process(target=work, args=(q,)); p.start()\n"
            "    print(q.get()); p.join(); print(p.exitcode)\n"
        )
        assert run(source).out == "from the child\n0\n"
