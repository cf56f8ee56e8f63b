"""Which code a run is: its files are found and hashed. Probing, as `facts` does; `code.py` has the values.

A script whose workdir is a git repository gets a copy of what git knows or would add (tracked and untracked, not
ignored). What git ignores (data, built extensions, outputs) is linked to the live tree, so that paths next to a
script's own file lead where they did. Everything else runs from the live tree, whose Python files are hashed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import launcher
from launcher.planning.calls import answer
from launcher.planning.code import LINK, CodeFacts, CodeSource

SIZE_LIMIT_BYTES = 50_000_000
COUNT_LIMIT = 20_000
"""Files of a snapshot. What is larger is data, or somebody's whole home."""
LIVE_COUNT_LIMIT = 2_000
LIVE_FOLDERS_LIMIT = 1_000
LINKS_LIMIT = 2_000
GIT_LIMIT_S = 10.0

PRIVATE = (
    ".env",
    ".env.*",
    ".netrc",
    ".pypirc",
    "*.pem",
    "*.key",
    "*.p12",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
)
"""Names of files that hold secrets and no code. They stay where they are."""
OUTPUTS = (
    *(".log", ".out", ".err", ".txt", ".csv", ".tsv", ".jsonl", ".png", ".svg", ".pdf"),
    *(".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".npy", ".npz", ".pkl", ".parquet", ".zip", ".gz", ".tar"),
)
"""An untracked file with such a name (`launch train.py > train.log`) counts as ignored: it changes while runs run."""
_NEVER = ("__pycache__", "*.py[cod]", ".*")
"""What is ignored and not even linked: bytecode, and what tools keep for themselves."""
_OF_A_RUN = {"plan.json", "resolved.yaml", "launch.json"}
"""A folder that has these is the record of a run, in whatever place runs were made before."""
_NO_CODE = ("site-packages", "node_modules", "__pycache__")

PACKAGE_REASON = "the training program is part of the installed package"


def gather_code(source: CodeSource, *, snapshot: bool = True) -> CodeFacts:
    """Find and hash the code of a script. `snapshot=False`: only what is watched of the live tree."""
    if not snapshot:
        return _live(source, "")
    found = _git_files(source.root)
    if isinstance(found, str):
        return _live(source, found)
    known, ignored = found
    files, skipped = _sorted_out(known, source)
    if reason := _too_big(source.root, files) or _misses_target(source, files):
        return _live(source, reason)
    try:
        return _hashed(source, files, skipped, ignored)
    except OSError as error:
        return _live(source, f"{error.filename} cannot be read: {error.strerror}")


def package_code() -> CodeFacts:
    """The code of the built-in job: what computes. A launcher that starts and watches it in another way is no other."""
    root = Path(launcher.__file__).resolve().parents[1]
    return _read_live(str(root), sorted((root / "jobs").rglob("*.py")), PACKAGE_REASON)


def file_digest(path: Path) -> str:
    """What `files` holds of one path."""
    if path.is_symlink():
        return f"{LINK}{os.readlink(path)}"  # noqa: PTH115 - the text of the link, whatever it is
    return hashlib.sha256(path.read_bytes()).hexdigest()


def code_roots(source: CodeSource) -> list[str]:
    """Where the target of a launch may lie below its root: one of these has to be part of a copy."""
    if source.script is not None:
        return [os.path.relpath(source.script, source.root)]
    path = str(source.module).replace(".", "/")
    return [f"{path}.py", f"{path}/__main__.py"]


# ---------------------------------------------------------------- a snapshot


def _git_files(root: str) -> tuple[list[str], list[str]] | str:
    """Paths that git knows or would add, and what it ignores; or why that cannot be told."""
    git = shutil.which("git")
    if git is None:
        return "git is not installed"
    if not os.path.isdir(root):  # noqa: PTH112 - a path as it was given
        return f"there is no folder {root}"
    base = [git, "-C", root, "--no-optional-locks", "ls-files", "-z", "--others", "--exclude-standard"]
    calls = [
        subprocess.Popen(
            [*base, *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        for more in (["--cached", "-t"], ["--ignored", "--directory"])
    ]
    outputs: list[list[str]] = []
    reason = ""
    for call in calls:
        try:
            out, err = answer(call, limit_s=GIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            reason = f"git took more than {GIT_LIMIT_S:.0f} s to list it"
            continue
        if call.returncode:
            reason = _git_reason(err.decode(errors="replace"))
        outputs.append([os.fsdecode(name) for name in dict.fromkeys(out.split(b"\0")) if name])
    if reason:
        return reason
    # `-t` puts a letter and a space before each name: `?` for what is not tracked.
    made = [name[2:] for name in outputs[0] if name[0] == "?" and name.endswith(OUTPUTS)]
    known = [name[2:] for name in outputs[0] if name[0] != "?" or not name.endswith(OUTPUTS)]
    return known, [*outputs[1], *made]


def _git_reason(said: str) -> str:
    if "not a git repository" in said:
        return "it is no git repository"
    lines = [line.removeprefix("fatal: ") for line in said.splitlines() if line.strip()]
    return f"git: {lines[0]}" if lines else "git cannot list it"


def _sorted_out(known: Iterable[str], source: CodeSource) -> tuple[dict[str, os.stat_result], dict[str, str]]:
    """The files that a copy takes, and what it leaves out although git would have it."""
    names = list(known)
    runs = _run_folders(names) | {os.path.relpath(source.runs_dir, source.root)}
    files: dict[str, os.stat_result] = {}
    skipped: dict[str, str] = {}
    for name in names:
        path = name.rstrip("/")
        if any(_below(path, folder) for folder in runs):
            continue
        try:
            status = os.lstat(os.path.join(source.root, path))  # noqa: PTH118 - twenty thousand of them
        except OSError:
            continue  # deleted, and git does not know yet
        if stat.S_ISDIR(status.st_mode):
            skipped[path] = "a repository of its own: linked, not copied"
        elif _is_private(path):
            skipped[path] = "it may hold a secret"
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            files[path] = status
    return files, skipped


def _run_folders(names: Iterable[str]) -> set[str]:
    seen: dict[str, set[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder and file in _OF_A_RUN:
            seen.setdefault(folder, set()).add(file)
    return {folder for folder, files in seen.items() if files == _OF_A_RUN}


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _is_private(path: str) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatch(name, pattern) for pattern in PRIVATE)


def _too_big(root: str, files: Mapping[str, os.stat_result]) -> str:
    if len(files) > COUNT_LIMIT:
        return f"{root} has {len(files):,} files, more than {COUNT_LIMIT:,}"
    total = sum(status.st_size for status in files.values())
    if total <= SIZE_LIMIT_BYTES:
        return ""
    largest = max(files, key=lambda path: files[path].st_size)
    return (
        f"{root} has {_megabytes(total)}, more than {_megabytes(SIZE_LIMIT_BYTES)} "
        f"(the largest file: {largest}, {_megabytes(files[largest].st_size)}; what .gitignore names is not counted)"
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


def _misses_target(source: CodeSource, files: Mapping[str, os.stat_result]) -> str:
    places = code_roots(source)
    found = next((place for place in places if place in files), None)
    if found is not None:
        behind = Path(os.path.realpath(Path(source.root, found)))
        if not stat.S_ISLNK(files[found].st_mode) or os.path.relpath(behind, os.path.realpath(source.root)) in files:
            return ""
        return f"{found} is a link to {behind}, which is no part of it"
    if source.script is None:
        return f"module {source.module} is no file of {source.root}"
    if not os.path.lexists(source.script):
        return f"there is no {source.script}"
    if places[0].startswith(".."):
        return f"{source.script} lies outside the workdir {source.root}"
    return f"git ignores {places[0]}"


def _hashed(
    source: CodeSource, found: Mapping[str, os.stat_result], skipped: dict[str, str], ignored: Iterable[str]
) -> CodeFacts:
    files: dict[str, str] = {}
    size_bytes = 0
    for path in found:
        if stat.S_ISLNK(found[path].st_mode):
            files[path] = file_digest(Path(source.root, path))
            continue
        content = Path(source.root, path).read_bytes()
        if source.holds_secret(content):  # without it the copy may be broken, with it the secret is kept
            return _live(source, f"{path} holds the value of a secret")
        files[path] = hashlib.sha256(content).hexdigest()
        size_bytes += len(content)
    outside = [*(path for path, why in skipped.items() if "repository" in why), *_linkable(ignored, source)]
    links = {path: os.path.join(source.root, path) for path in outside[:LINKS_LIMIT]}  # noqa: PTH118
    if len(outside) > LINKS_LIMIT:
        skipped["(ignored files)"] = f"{len(outside):,} of them, of which {LINKS_LIMIT:,} are linked"
    return CodeFacts(root=source.root, snapshot=True, files=files, size_bytes=size_bytes, links=links, skipped=skipped)


def _linkable(ignored: Iterable[str], source: CodeSource) -> Iterator[str]:
    """What git ignores and a script may look for beside itself; never a folder in which runs are."""
    runs = os.path.relpath(source.runs_dir, source.root)
    for name in ignored:
        path = name.rstrip("/")
        parts = path.split("/")
        hidden = any(fnmatch(part, pattern) for part in parts for pattern in _NEVER)
        if path and not hidden and not _is_private(path) and not _below(path, runs) and not _below(runs, path):
            yield path


# ---------------------------------------------------------------- the live tree


def _live(source: CodeSource, reason: str) -> CodeFacts:
    """The Python files of the script's folder, a bounded number: what tells that the code is another one now."""
    folder = source.root if source.script is None else os.path.dirname(os.path.realpath(source.script))  # noqa: PTH120
    runs = os.path.realpath(source.runs_dir)
    return _read_live(folder, list(_python_files(folder, runs)), reason)


def _python_files(folder: str, runs_dir: str) -> Iterator[Path]:
    """In a fixed order: files before folders, by name, so that a bound cuts at the same place each time."""
    files = visited = 0
    for here, folders, names in os.walk(folder):
        visited += 1
        if visited > LIVE_FOLDERS_LIMIT:
            return
        inside = {*names, *folders}
        if here != folder and (inside >= _OF_A_RUN or "pyvenv.cfg" in inside):
            folders.clear()
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in _NO_CODE and os.path.join(here, name) != runs_dir  # noqa: PTH118
        )
        for name in sorted(names):
            if name.endswith(".py"):
                files += 1
                if files > LIVE_COUNT_LIMIT:
                    return
                yield Path(here, name)


def _read_live(root: str, paths: Iterable[Path], reason: str) -> CodeFacts:
    files: dict[str, str] = {}
    size_bytes = 0
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            continue  # a dangling link, or not ours to read: no worker reads it either
        files[str(path.relative_to(root))] = hashlib.sha256(content).hexdigest()
        size_bytes += len(content)
    return CodeFacts(root=root, snapshot=False, reason=reason, files=files, size_bytes=size_bytes)
