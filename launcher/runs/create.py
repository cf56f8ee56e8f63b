"""A run directory is made here, once, and gets a new plan when a person resumes it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launcher
from launcher import redact
from launcher.errors import Problem, Refused
from launcher.planning.codeplan import code_plan
from launcher.recipe.dump import dump_yaml
from launcher.runs.carry import carry_agent
from launcher.runs.code import store_code
from launcher.runs.events import EventWriter
from launcher.runs.find import state_folder, write_pointer
from launcher.runs.rundir import RunDir

if TYPE_CHECKING:
    from random import Random

    from launcher.planning.code import CodeFacts
    from launcher.planning.facts import Facts
    from launcher.planning.plan import Plan

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # without i, l, o, 0, 1: an id is read aloud and typed again
_DIST_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)\.dist-info")
_DIFF_LIMIT_BYTES = 1_000_000
_GIT_TIMEOUT_S = 5.0


def new_run_id(name: str, *, now: datetime, random: Random) -> str:
    """A run id such as `mnist-ddp-1130-0214-k7qz`: the name, month-day, hour-minute, and four random characters."""
    safe = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "run"
    return f"{safe}-{now:%m%d-%H%M}-{''.join(random.choice(_ALPHABET) for _ in range(4))}"


def resolved_recipe(plan: Plan) -> dict[str, Any]:
    """The recipe as it was understood, in full: it plans the same run from any directory and without its parent."""
    workdir: str | None = plan.worker.cwd
    if plan.sky is not None:  # the workers run in the run directory, on other machines
        workdir = plan.code.root if plan.worker.kind == "script" and plan.code is not None else plan.recipe["workdir"]
    paths = {"workdir": workdir, "script": plan.live_script, "extends": None}
    return {key: value for key, value in {**plan.recipe, **paths}.items() if value is not None}


def create(
    plan: Plan,
    *,
    recipe_text: str | None,
    resolved: Mapping[str, Any],
    command: Sequence[str],
    facts: Facts,
    rerun_of: str | None = None,
    code_origin: Path | None = None,
) -> RunDir:
    """Make the run directory of a plan, and the pointer that finds it from anywhere.

    `rerun_of` is the run whose plan this is; `code_origin` where its code is copied from, by default the live tree.

    Raises Refused where a folder cannot be written, UnicodeEncodeError for a path that is not UTF-8; nothing is left
    behind then.
    """
    state_folder()  # first, so that a home which cannot be written is found before anything exists
    run = RunDir(Path(plan.run_dir))
    with whole_folder(run, private=holds_code(facts)):
        if facts.code is not None:  # a file may have changed since it was looked at: what counts is what is copied
            plan = dataclasses.replace(plan, code=code_plan(store_code(run, facts.code, origin=code_origin)))
        _fill(run, plan, recipe_text=recipe_text, resolved=resolved, command=command, facts=facts, rerun_of=rerun_of)
    return run


def discard(run: RunDir) -> None:
    """Undo `create`, for a run that its place does not take: nothing of it is left."""
    shutil.rmtree(run.path, ignore_errors=True)
    for pointer in state_folder().glob(f"*_{run.run_id}.json"):
        pointer.unlink(missing_ok=True)


def _fill(
    run: RunDir,
    plan: Plan,
    *,
    recipe_text: str | None,
    resolved: Mapping[str, Any],
    command: Sequence[str],
    facts: Facts,
    rerun_of: str | None,
) -> None:
    redact.remember(plan.secrets)
    redactor = redact.own()
    if recipe_text is not None:
        run.recipe.write_text(redactor.text(recipe_text), encoding="utf-8")
    run.resolved.write_text(dump_yaml(resolved), encoding="utf-8")
    run.plan.write_text(plan.to_json(), encoding="utf-8")
    carry_agent(run, plan)
    run.write_token()
    (run.path / "logs").mkdir()
    run.checkpoints.mkdir()  # `torch.save` does not make the folder that it is given
    record = redactor.document(launch_record(plan, command=command, facts=facts, rerun_of=rerun_of))
    run.launch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record_event(run, "created", command=list(command), user=facts.user, host=facts.hostname)
    write_pointer(run)


def update_plan(run: RunDir, plan: Plan, *, resolved: Mapping[str, Any], code: CodeFacts | None = None) -> str | None:
    """Give a run that has ended a new plan, and a new code if there is one.

    The old ones stay, as `plan-<k>.json`, `result-<k>.json`, `code-<k>/`. Returns its name, if there is one.
    Raises Refused, with everything as it was, where they cannot be written.
    """
    number = next_number(run)
    replaced = [run.plan, run.resolved, run.result, *([run.code, run.code_record] if code is not None else [])]
    kept = {path: path.with_name(f"{path.stem}-{number}{path.suffix}") for path in replaced if path.exists()}
    try:
        for path, old in kept.items():
            path.rename(old)
        if code is not None:
            if code.snapshot:
                run.path.chmod(0o700)
            plan = dataclasses.replace(plan, code=code_plan(store_code(run, code)))
        carry_agent(run, plan)
        run.resolved.write_text(dump_yaml(resolved), encoding="utf-8")
        run.plan.write_text(plan.to_json(), encoding="utf-8")
    except OSError as error:
        _put_back(replaced, kept)
        message = f"the run directory cannot be written: {error.strerror}"
        raise Refused([Problem(where=str(run.path), message=message)]) from error
    run.stop_file.unlink(missing_ok=True)
    return kept[run.code].name if run.code in kept else None


def _put_back(replaced: Iterable[Path], kept: Mapping[Path, Path]) -> None:
    for path in replaced:
        if path in kept and not kept[path].exists():
            continue  # it was not its turn yet
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if path in kept:
            kept[path].rename(path)


def holds_code(facts: Facts) -> bool:
    """Whether a run directory keeps code of the user's, which may be nobody else's business."""
    return bool(facts.git.get("dirty")) or (facts.code is not None and facts.code.snapshot)


@contextmanager
def claimed(run: RunDir, *, by: Path | None = None) -> Iterator[None]:
    """Hold a run while it is resumed, so that two people do not start it twice. Raises Refused where another holds it.

    by: the file that is locked, in place of its token.

    The lock ends with this process, by whatever means; agents do not inherit it.
    """
    try:
        descriptor = os.open(by or run.token, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        message = f"its file `{(by or run.token).name}` cannot be read: {error.strerror}"
        hint = "a run that is moved or copied takes all its files along; `launch rerun` starts a new run of its plan"
        raise Refused([Problem(where=str(run.path), message=message, hint=hint)]) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused([Problem(where=run.run_id, message="another `launch resume` of it is at work")]) from error
        yield
    finally:
        os.close(descriptor)


def next_number(run: RunDir) -> int:
    """The k of the next `plan-<k>.json`: 1 for the plan of the first launch."""
    return 1 + len(list(run.path.glob("plan-*.json")))


def record_event(run: RunDir, event: str, **fields: Any) -> None:
    """Write one event of the command line: each call has a file of its own, so that no two writers share one."""
    writer = EventWriter(run.path, f"launch-{time.time_ns() // 1_000_000}-{os.getpid()}")
    try:
        writer.write(event, **fields)
    finally:
        writer.close()


def launch_record(plan: Plan, *, command: Sequence[str], facts: Facts, rerun_of: str | None = None) -> dict[str, Any]:
    """Who launched what, where and with which versions: the content of launch.json."""
    return {
        "run_id": plan.run_id,
        "time": round(time.time(), 3),
        "user": facts.user,
        "host": facts.hostname,
        "cwd": facts.cwd,
        "pid": os.getpid(),
        "command": list(command),
        "rerun_of": rerun_of,
        "python": {"executable": facts.python, "version": facts.python_version},
        "platform": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "versions": {"launcher": launcher.__version__, "torch": facts.torch_version},
        "git": {**facts.git, **(_git_diff(facts.cwd) if facts.git.get("dirty") else {})},
        "packages": installed_packages(sys.path),
    }


def installed_packages(folders: Iterable[str]) -> dict[str, str]:
    """Name -> version, from the names of the `.dist-info` folders; reading their contents takes ten times longer."""
    found: dict[str, str] = {}
    for folder in map(Path, folders):
        names = os.listdir(folder) if folder.is_dir() else []  # noqa: PTH208 - names are all that is needed
        for match in filter(None, map(_DIST_INFO.fullmatch, names)):
            found.setdefault(match["name"].replace("_", "-").lower(), match["version"])
    return dict(sorted(found.items()))


@contextmanager
def whole_folder(run: RunDir, *, private: bool) -> Iterator[None]:
    """Make the folder of a run or a sweep, for its owner alone if `private`, and fill it inside.

    Raises Refused where it cannot be made or written; nothing is left behind where filling it fails.
    """
    hint = "another place for runs: --runs-dir DIR, or LAUNCH_RUNS"
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir(mode=0o700 if private else 0o777)
    except OSError as error:
        message = f"the run directory cannot be made: {error.strerror}"
        raise Refused([Problem(where=str(run.path), message=message, hint=hint)]) from error
    try:
        yield
    except UnicodeEncodeError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        message = f"the run directory cannot be written: {error.strerror}"
        raise Refused([Problem(where=str(run.path), message=message, hint=hint)]) from error


def _git_diff(cwd: str) -> dict[str, Any]:
    """The changes of the working tree against the last commit, cut at 1 MB, or the reason why they are not there."""
    command = ["git", "-C", cwd, "diff", "HEAD", "--no-ext-diff", "--no-color"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"diff": None, "diff_missing": str(error)}
    if done.returncode:
        return {"diff": None, "diff_missing": done.stderr.decode(errors="replace").strip()}
    clean = redact.own().data(done.stdout)  # before it is cut: half a secret would not be found
    text = clean[:_DIFF_LIMIT_BYTES].decode(errors="replace")
    return {"diff": text, "diff_truncated": len(done.stdout) > _DIFF_LIMIT_BYTES}
