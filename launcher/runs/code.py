"""The code of a run in its directory: `code.json` says which files it has, `code/` is the copy where there is one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, Refused
from launcher.planning.code import CodeChanges, CodeFacts, CodeSource, code_changes, is_link
from launcher.planning.codefacts import code_roots, file_digest, gather_code, package_code
from launcher.runs.rundir import RunDir

SAME, CURRENT, UNCHANGED = "same", "current", "unchanged"
"""`launch resume --code` takes the first two."""
_NOT_RECORDED = "its `{}` is missing or damaged"


@dataclass(frozen=True, kw_only=True)
class CodeChoice:
    """The code that a run goes on with."""

    code: CodeFacts
    word: str
    """same, current or unchanged."""
    is_new: bool
    """Whether it takes the place of the one that the run has."""


def choose_code(run: RunDir, source: CodeSource | None, choice: str | None) -> CodeChoice:
    """The code that a resume goes on with. `source` is None for the built-in job.

    Raises Refused where the live code is another one and nobody said which, and where what was said is not there.
    """
    old = read_code(run)
    if old is None:
        if choice != CURRENT:
            message = f"whether the code has changed is not known: {_NOT_RECORDED.format(run.code_record.name)}"
            hint = "--code current takes the files as they are"
            raise Refused([Problem(where=run.run_id, message=message, hint=hint)])
        now = package_code() if source is None else gather_code(source)
        return CodeChoice(code=now, word=CURRENT, is_new=True)
    if source is None or not old.snapshot:
        return _of_live_tree(run, old, source, choice)
    if (spoiled := copy_changes(run, old)) and choice != CURRENT:
        message = f"the copy of its code, {run.code}, was changed: {', '.join(spoiled.lines())}"
        raise Refused([Problem(where=run.run_id, message=message, hint="--code current takes the files as they are")])
    if choice == SAME:
        if not any(place in old.files for place in code_roots(source)):
            message = f"{source.script or source.module} is not in the copy of its code"
            raise Refused([Problem(where="--code same", message=message)])
        return CodeChoice(code=dataclasses.replace(old, root=source.root), word=SAME, is_new=False)
    now = gather_code(source)
    changes = code_changes(old, now) if now.snapshot else CodeChanges()
    if now.snapshot and not changes and not spoiled:
        return CodeChoice(code=dataclasses.replace(old, root=source.root), word=UNCHANGED, is_new=False)
    if choice == CURRENT:
        return CodeChoice(code=now, word=CURRENT, is_new=True)
    what = f"changed since: {', '.join(changes.lines())}" if changes else f"out of reach of a comparison: {now.reason}"
    hint = "--code same goes on with the copy of the run, --code current with the files as they are now"
    raise Refused([Problem(where=run.run_id, message=f"the code in {source.root} is {what}", hint=hint)])


def _of_live_tree(run: RunDir, old: CodeFacts, source: CodeSource | None, choice: str | None) -> CodeChoice:
    now = package_code() if source is None else gather_code(source, snapshot=False)
    changes = code_changes(old, now)
    if not changes:
        return CodeChoice(code=dataclasses.replace(now, reason=old.reason), word=UNCHANGED, is_new=False)
    if choice == CURRENT:
        return CodeChoice(code=now if source is None else gather_code(source), word=CURRENT, is_new=True)
    message = f"the code in {now.root} is changed since: {', '.join(changes.lines())}"
    hint = "--code current goes on with the files as they are now"
    if choice == SAME:
        message += f"; there is no copy to go on with ({old.reason})"
        hint = f"put the files back as they were, or {hint}"
    raise Refused([Problem(where=run.run_id, message=message, hint=hint)])


def code_of_rerun(run: RunDir, source: CodeSource | None) -> tuple[CodeFacts, Path | None, tuple[str, ...]]:
    """The code of another run, where it is copied from (None = the live tree), and what to say about it."""
    old = read_code(run)
    if source is not None and old is not None and old.snapshot:
        return _copy_of(run, old, source)
    now = package_code() if source is None else gather_code(source)
    watched = gather_code(source, snapshot=False) if source is not None and now.snapshot else now
    if old is None:
        why = _NOT_RECORDED.format(run.code_record.name)
        return now, None, (f"code: as it is now in {now.root}, maybe not that of {run.run_id} ({why})",)
    changes = code_changes(old, watched)
    said = f"code: as it is now in {now.root}, changed since {run.run_id}: {', '.join(changes.lines())}"
    return now, None, (said,) if changes else ()


def _copy_of(run: RunDir, old: CodeFacts, source: CodeSource) -> tuple[CodeFacts, Path | None, tuple[str, ...]]:
    if spoiled := copy_changes(run, old):
        why = f"its copy was changed: {', '.join(spoiled.lines())}"
    elif not any(place in old.files for place in code_roots(source)):
        why = f"its copy has no {source.script or source.module}"
    else:
        return dataclasses.replace(old, root=source.root), run.code, (f"code: the copy of {run.run_id}",)
    return gather_code(source), None, (f"code: as it is now in {source.root}, not that of {run.run_id} ({why})",)


def store_code(run: RunDir, code: CodeFacts, *, origin: Path | None = None) -> CodeFacts:
    """Copy the files of a code, and write down which they are. Returns what was copied in fact.

    `origin` is where the files lie, by default in the live tree. Raises OSError.
    """
    if code.snapshot:
        code = _copy(code, Path(code.root) if origin is None else origin, run.code)
    record = json.dumps(dataclasses.asdict(code), indent=1) + "\n"  # in ASCII: a name may be no UTF-8
    run.code_record.write_text(record, encoding="ascii")
    return code


def read_code(run: RunDir) -> CodeFacts | None:
    """The code that a run was given; None where its record is missing or damaged."""
    try:
        return CodeFacts(**json.loads(run.code_record.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def copy_changes(run: RunDir, code: CodeFacts) -> CodeChanges:
    """What somebody has changed in the copy since it was made. A link of it may lead elsewhere than the live one."""
    found = {
        path: digest if is_link(digest) else file_digest(run.code / path)
        for path, digest in code.files.items()
        if os.path.lexists(run.code / path)
    }
    return code_changes(code, CodeFacts(root=str(run.code), snapshot=True, files=found))


def _copy(code: CodeFacts, origin: Path, target: Path) -> CodeFacts:
    """Copy files, and link what is only linked. A file is recorded as it was when it was copied."""
    target.mkdir()
    copied: dict[str, str] = {}
    size_bytes = 0
    for path, digest in code.files.items():
        source, copy = origin / path, target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            if is_link(digest):
                copy.symlink_to(_link_target(code, origin, path))
                copied[path] = digest
                continue
            content, mode = source.read_bytes(), source.stat().st_mode
        except FileNotFoundError:
            continue  # deleted since it was listed
        copy.write_bytes(content)
        copy.chmod(stat.S_IMODE(mode) | stat.S_IRUSR | stat.S_IWUSR)
        copied[path] = hashlib.sha256(content).hexdigest()
        size_bytes += len(content)
    for path, place in code.links.items():
        link = target / path
        if os.path.lexists(place) and not os.path.lexists(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(place)
    return dataclasses.replace(code, files=copied, size_bytes=size_bytes)


def _link_target(code: CodeFacts, origin: Path, path: str) -> str:
    """Where a link of the copy leads: to the copy of what it meant, or to the thing itself where that is not copied."""
    text = os.readlink(origin / path)  # noqa: PTH115 - the text of the link, whatever it is
    if os.path.isabs(text):  # noqa: PTH117
        return text
    meant = os.path.normpath(os.path.join(os.path.dirname(path), text))  # noqa: PTH118, PTH120
    inside = meant in code.files or meant in code.links or any(each.startswith(f"{meant}/") for each in code.files)
    return text if inside else os.path.join(code.root, meant)  # noqa: PTH118
