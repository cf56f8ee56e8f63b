"""The code of a run in its directory: `code.json` says which files it has, `code/` is the copy where there is one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from pathlib import Path

from launcher.errors import Problem, Refused
from launcher.planning.codefacts import CodeChanges, CodeFacts, code_changes, file_digest, is_link
from launcher.runs.rundir import RunDir


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
    """The code that a run was given; None for one that was made before code was recorded."""
    try:
        return CodeFacts(**json.loads(run.code_record.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise Refused([Problem(where=str(run.code_record), message="this is no record of code")]) from error


def set_code_aside(run: RunDir, number: int) -> str:
    """Keep the code of the attempts so far as `code-<k>/`, `code-<k>.json`. Returns the name of the former."""
    for path in (run.code, run.code_record):
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return f"{run.code.name}-{number}"


def copy_changes(run: RunDir, code: CodeFacts) -> CodeChanges:
    """What somebody has changed in the copy since it was made."""
    found = {path: file_digest(run.code / path) for path in code.files if os.path.lexists(run.code / path)}
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
