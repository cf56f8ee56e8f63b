"""Runs a user's script as `python script.py args` would, or a module as `python -m` would; writes down how it failed.

Standard library only and run by path, so that nothing of ours is on the script's sys.path:
`python -P wrapper.py script.py args...` or `python -P wrapper.py -m FOLDER MODULE args...`. A worker that is forked
from a preloaded process calls the same functions. `--job MODULE args...` is the built-in job where it cannot be forked.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn


def _load(path: Path) -> Any:
    """A module of ours by its path: it cannot be imported here, and what it imports must not be the user's."""
    spec = importlib.util.spec_from_file_location(f"_launch_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_redact = _load(Path(__file__).parents[1] / "redact.py")

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Nobody else's: the ordinary ones have meanings, the first real-time ones are the C library's own."""

ENDED_BY = "ended by "
"""Before an error that is shown without a traceback; `last_words` finds it in the log by this."""


def show_stacks_on_signal() -> None:
    """From now on STACKS_SIGNAL makes this process write the Python stacks of its threads on descriptor 2.

    In C, without the interpreter: also from a loop that never lets go of it, or from inside a collective. A crash
    (SIGSEGV, SIGABRT ...) writes them too, and is what it was for everybody else.
    """
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=False)


def run_script(script: str, argv: Sequence[str]) -> None:
    """Run a file as __main__, with its own folder first on sys.path."""
    _set_the_stage()
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).resolve().parent))  # behind a link, as Python does
    runpy.run_path(script, run_name="__main__")


def run_module(folder: str, module: str, argv: Sequence[str]) -> None:
    """Run a module as __main__, with the folder it is in first on sys.path."""
    _set_the_stage()
    sys.argv = [module, *argv]  # its path takes the first place, once it is found
    sys.path.insert(0, folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_job(module: str, argv: Sequence[str]) -> int | None:
    """Call the `main` of a module of ours, as a forked worker does."""
    code: int | None = importlib.import_module(module).main(list(argv))
    return code


_OURS = ("launcher", "jobs")
_ROOT = Path(__file__).resolve().parents[2]
"""The folder that our packages are in: that of the installation, or one in the run directory."""


def _set_the_stage() -> None:
    """What a script finds of ours: `launch_client`, last on sys.path, and what its recipe asks for. Nothing else.

    Our modules that a forked worker has inherited go on working without their names.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    sys.meta_path.insert(0, _UsersFirst())
    if run_dir := os.environ.get("LAUNCH_RUN_DIR"):
        sys.path.append(str(Path(run_dir, "agent", "client")))
    if adapter := os.environ.get("LAUNCH_ADAPTER"):
        _install_adapter(adapter)


class _UsersFirst:
    """Finds a `launcher` or `jobs` of the user's before ours, also where it is a folder without an `__init__.py`.

    Python prefers a package with one that stands anywhere on sys.path, and ours may be installed there.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """None: go on as usual."""
        if name not in _OURS:
            return None
        return PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() != _ROOT])


def _install_adapter(name: str) -> None:
    """Load the folder `adapters` by path, under a name of its own; it waits for the import of its framework."""
    folder = Path(__file__).with_name("adapters")
    spec = importlib.util.spec_from_file_location(
        "launch_adapters", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["launch_adapters"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install(name)


def guarded(work: Callable[[], int | None], *, below: str | None = None) -> int:
    """Do the work; print and record whatever it raises; return the exit code that Python would give.

    `below`: the traceback starts at this file; else at the first one that is not ours. A user sees his own frames.
    """
    try:
        return work() or 0
    except SystemExit as error:
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: all that is left is to say it and end
        # torch's handler for the ends of loader processes raises wherever the program is, here too.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        trace = _from_file(error.__traceback__, below)
        text = "".join(traceback.format_exception(type(error), error, trace))
        write_error_file(error, trace, text)
        if _is_plain(error):
            _flush(sys.stdout)
            _say(f"{ENDED_BY}{_message(error)}\n")
        else:
            _show(error, trace, text)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_plain(error: BaseException) -> bool:
    """Whether the message says all: a full disk, a loss that is not a number. Where our code found it helps nobody."""
    return getattr(error, "launch_plain", False) is True


def _show(error: BaseException, trace: TracebackType | None, text: str) -> None:
    """As Python does: by the script's own `sys.excepthook` where it has one (W&B's notes that the run has failed)."""
    _flush(sys.stdout)
    hook = sys.excepthook
    if hook is not sys.__excepthook__:
        try:
            hook(type(error), error.with_traceback(trace), trace)
        except Exception as second:  # noqa: BLE001 - whatever it raises, the first one is to be seen
            more = "".join(traceback.format_exception(second))
            text = f"Error in sys.excepthook:\n{more}\nOriginal exception was:\n{text}"
        else:
            return
    _say(text)


def _say(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return  # the script has closed or removed it, and Python would say nothing either


def _flush(stream: Any) -> bool:
    """False where something that was printed is lost. A stream that the script has closed or removed has nothing."""
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def write_error_file(error: BaseException, trace: TracebackType | None, text: str) -> None:
    """Write torch.distributed.elastic's error file (TORCHELASTIC_ERROR_FILE), with the place in fields of our own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    record = {
        "message": {
            "message": _message(error),
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "exception": type(error).__name__,
        "exception_bases": [base.__name__ for base in type(error).__mro__],
        "place": "" if _is_plain(error) else _place(error, traceback.extract_tb(trace)),
        "step": step if isinstance(step := getattr(error, "launch_step", None), int) else None,
    }
    # The exception may have come from anywhere, a full disk included; the traceback on stderr is there in any case.
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(_redact.own().text(json.dumps(record)))
    except OSError as failure:
        _say(f"launch: the error file could not be written: {failure}\n")


def _message(error: BaseException) -> str:
    """`ValueError: the text`, and below a group what is in it."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - the code of an exception of the user's; this is Python's own word for it
        text = "<exception str() failed>"
    own = f"{name}: {text}" if text else name
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return "\n".join((own, *(f"  {line}" for each in inner for line in _message(each).splitlines())))


def _place(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Where it happened, in the code of who wrote the script: the innermost frame that is in no library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    if not frames:
        return ""
    root = Path(frames[0].filename).absolute().parent
    own = [frame for frame in frames if not frame.filename.startswith("<") and _is_own(frame.filename, root)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


_LIBRARIES = (Path(os.__file__).absolute().parent, Path(__file__).absolute().parent)


def _is_own(file: str, root: Path) -> bool:
    """Whether a file is beside the script (which may be installed itself), or in no folder of libraries."""
    path = Path(file).absolute()
    if path.is_relative_to(root):
        path = path.relative_to(root)
    return not (any(map(path.is_relative_to, _LIBRARIES)) or {"site-packages", "dist-packages"} & set(path.parts))


def leave(code: int, *, finish: bool) -> NoReturn:
    """End the process without tearing the interpreter down, which costs 0.6 s once torch is imported.

    finish: first do what Python does for a script (join threads, run atexit functions, flush files left open).
    """
    if finish:
        code = guarded(_finish_interpreter) or code
    if not all([_flush(sys.stdout), _flush(sys.stderr)]):  # both, whatever the first one says
        code = code or 120  # what Python itself returns for this
    os._exit(code)


def _finish_interpreter() -> int:
    threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads, as Python does before atexit
    atexit._run_exitfuncs()
    for found in gc.get_objects():
        # By type, not isinstance: that asks __class__, and strange objects answer with warnings or worse.
        if issubclass(type(found), (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)):
            try:
                found.flush()
            except (OSError, ValueError):
                continue  # closed, detached or broken: Python ignores these too when it collects a file
    return 0


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    _say(f"{error.code}\n")
    return 1


_AROUND = frozenset({__file__, str(Path(__file__).with_name("zygote.py")), runpy.__file__, "<frozen runpy>"})


def _from_file(trace: TracebackType | None, file: str | None) -> TracebackType | None:
    frame = trace
    while frame is not None and file is not None:
        if frame.tb_frame.f_code.co_filename == file:
            return frame
        frame = frame.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename in _AROUND:
        trace = trace.tb_next
    return trace


def main() -> NoReturn:
    """`python -P wrapper.py script.py args...`, `-m FOLDER MODULE args...` or `--job MODULE args...`."""
    show_stacks_on_signal()
    first, *rest = sys.argv[1:]
    if first == "--job":
        module, *argv = rest
        leave(guarded(lambda: _run_job(module, argv)), finish=False)
    if first == "-m":
        folder, module, *argv = rest
        leave(guarded(lambda: run_module(folder, module, argv)), finish=True)
    leave(guarded(lambda: run_script(first, rest), below=first), finish=True)


if __name__ == "__main__":
    main()
