"""What the schema alone cannot say about a script and what it is given."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.placeholders import LATE_NAMES, names_in
from launcher.recipe.hints import did_you_mean
from launcher.recipe.nodes import Findings, Items, Keys, Node, Scalar, Table, dotted, present, section_at
from launcher.recipe.paths import expanded, interpreter, is_file, is_folder, real, real_but_name
from launcher.recipe.schema import FaultsSection, NetworkSection
from launcher.recipe.units import Duration

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NOT_OF_A_SCRIPT = {
    "rescue": "the state of a script is its own, and only its checkpoints outlive it",
    "on_nan": "a script looks at its losses itself",
    "max_skips": "a script looks at its losses itself",
}
"""Keys of `faults` that only the built-in program can follow, and why."""


def check_script(root: Table, findings: Findings) -> None:
    """Files that are not there, names that are none, expressions and placeholders that cannot work."""
    _check_file(root, findings)
    _check_module(root, findings)
    check_python(root, findings)
    _check_progress(root, findings)
    _check_resume(root, findings)
    _check_timeout(root, findings)
    _check_faults(root, findings)
    args = root.entries.get("args")
    for keys, text in _texts(("args",), args.value) if args is not None else ():
        if "newest" in names_in(text.text):
            hint = "resume: {newest: PATTERN, args: {...}}; or write {{newest}} for the text itself"
            findings.add(text.place, f"{dotted(keys)}: {{newest}} is there only in resume.args", hint)


def check_secret_names(root: Table, findings: Findings) -> None:
    """`secrets` are names of variables, whose values come from the environment alone."""
    entry = root.entries.get("secrets")
    env = section_at(root, ("env",))
    for name in entry.value.values if entry is not None and isinstance(entry.value, Items) else ():
        if not isinstance(name, Scalar) or name.null:
            continue  # the schema says so
        if not _VARIABLE.fullmatch(name.text):
            message = "secrets: this is not the name of a variable" + (", but KEY=VALUE" if "=" in name.text else "")
            findings.add(name.place, message, "only names, as in [HF_TOKEN]; the values come from your environment")
        elif env is not None and name.text in env.entries:
            place = env.entries[name.text].key
            findings.add(place, f"env.{name.text}: this is one of the secrets ({name.place}), too", "keep that one")


def check_env(root: Table, findings: Findings) -> None:
    """Names that no variable has, and values that no variable of all attempts can have."""
    env = section_at(root, ("env",))
    for name, entry in env.entries.items() if env else ():
        if late := _late(entry.value):
            instead = "LAUNCH_ATTEMPT" if late == "attempt" else "LAUNCH_RESUME_FROM"
            message = f"env.{name}: {{{late}}} differs between attempts, and only arguments can have it"
            findings.add(entry.place, message, f"{instead} is in the environment of each worker")
        if not name or "=" in name or "\0" in name:
            findings.add(entry.key, f"env: {name!r} cannot be the name of a variable", "it is not empty and has no `=`")


def _check_file(root: Table, findings: Findings) -> None:
    script = root.entries["script"] if present(root, "script") else None
    if script is not None and isinstance(script.value, Scalar):
        path = absolute(script.value)
        if not is_file(path):
            what = "is a folder, not a file" if is_folder(path) else "there is no such file"
            near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.py")])
            if script.value.literal:  # the target of the command, not a key of a recipe
                findings.add(script.place, what, near)
            else:
                hint = near or "a path is relative to the file it is written in"
                findings.add(script.place, f"script: {what}: {path}", hint)


def _check_module(root: Table, findings: Findings) -> None:
    module = root.entries["module"].value if present(root, "module") else None
    if isinstance(module, Scalar) and not _MODULE.fullmatch(module.text):
        hint = "a file is a `script`" if module.text.endswith(".py") else "as after `python -m`: pkg.train"
        findings.add(module.place, f"module: {module.text!r} is not the name of a module", hint)


def check_python(root: Table, findings: Findings) -> None:
    """An interpreter that is not there. What is inside a container cannot be seen from here."""
    if is_in_container(root):
        return
    python = root.entries["python"].value if present(root, "python") else None
    if not isinstance(python, Scalar):
        return
    path = python_of(python)
    if not is_file(path):
        near = shutil.which(python.text) if "/" not in python.text else None
        hint = f"write {near}" if near else "an interpreter, or the folder of a virtual environment"
        findings.add(python.place, f"python: there is no such file: {path}", hint)


def _check_progress(root: Table, findings: Findings) -> None:
    progress = section_at(root, ("progress",))
    entry = None if progress is None else progress.entries.get("log")
    if entry is None or not isinstance(entry.value, Scalar) or entry.value.null:
        return
    hint = "one group, which finds the step: 'step (\\d+)'"
    try:
        groups = re.compile(entry.value.text).groups
    except re.error as error:
        findings.add(entry.place, f"progress.log: `{entry.value.text}` is no regular expression: {error}", hint)
        return
    if groups != 1:
        message = f"progress.log: `{entry.value.text}` has {groups} groups, and the step is one"
        findings.add(entry.place, message, hint if groups == 0 else f"{hint}; a group that finds nothing is (?:...)")


def _check_resume(root: Table, findings: Findings) -> None:
    """`{newest}` is what a resume has found, so `resume.args` has to say it, or that the script asks for it."""
    resume = section_at(root, ("resume",))
    if resume is None:
        return
    newest = resume.entries.get("newest")
    late = _late(newest.value) if newest is not None else None
    if newest is not None and late:
        message = f"resume.newest: {{{late}}} is not known where the newest is looked for"
        findings.add(newest.place, message, "write * in its place")
    args = resume.entries.get("args")
    texts = [text.text for _, text in _texts(("resume", "args"), args.value)] if args is not None else []
    asks = args is not None and isinstance(args.value, Table) and not args.value.entries  # launch_client.resume_from
    if not asks and not any("newest" in names_in(text) for text in texts):
        place = root.entries["resume"].key if args is None else args.key
        message = "resume.args: no argument has {newest}, so the script is not told what to go on from"
        hint = 'as in {resume_from_checkpoint: "{newest}"}; or `resume: self` for a script that finds it by itself, '
        hint += "`args: {}` for one that reads launch_client.resume_from"
        findings.add(place, message, hint)


def _check_timeout(root: Table, findings: Findings) -> None:
    """The process group is the script's: nothing from outside sets its timeout. The record spells out the default."""
    network = section_at(root, ("network",))
    entry = None if network is None else network.entries.get("timeout")
    if entry is None or not isinstance(entry.value, Scalar) or entry.value.null:
        return
    try:
        asked = Duration.parse(entry.value.text)
    except ValueError:
        return  # the schema says so
    if asked.time_s != NetworkSection.model_fields["timeout"].default.time_s:
        message = "network.timeout: a script sets the timeout of its collectives itself, and none reaches it from here"
        findings.add(entry.key, message, "init_process_group(..., timeout=...) in the script")


def _check_faults(root: Table, findings: Findings) -> None:
    """What only the built-in program can do. The record of a run spells out the defaults, and that nothing is kept."""
    section = section_at(root, ("faults",))
    for key, why in NOT_OF_A_SCRIPT.items():
        entry = None if section is None else section.entries.get(key)
        if entry is None or not isinstance(entry.value, Scalar) or entry.value.null:
            continue
        if entry.value.text not in (str(FaultsSection.model_fields[key].default), "false"):
            findings.add(entry.key, f"faults.{key}: {why}", f"leave out {key}")


def _late(node: Node) -> str | None:
    """A placeholder that is known only when an attempt starts."""
    found = names_in(node.text) & set(LATE_NAMES) if isinstance(node, Scalar) else set()
    return min(found, default=None)


def _texts(keys: Keys, node: Node) -> Iterator[tuple[Keys, Scalar]]:
    """Every single value of a part, with its key; the items of a list under the key of the list."""
    if isinstance(node, Scalar):
        yield keys, node
    elif isinstance(node, Items):
        for item in node.values:
            yield from _texts(keys, item)
    else:
        for key, entry in node.entries.items():
            yield from _texts((*keys, key), entry.value)


def is_in_container(root: Table) -> bool:
    """Whether the workers run inside an image, with an interpreter of its own."""
    slurm = section_at(root, ("slurm",))
    return slurm is not None and present(slurm, "container")


def python_of(node: Scalar) -> Path:
    """The interpreter that was meant where it was written."""
    return interpreter(node.place.folder / expanded(node.text))


def script_of(node: Scalar) -> Path:
    """The script that was meant where it was written."""
    return real_but_name(node.place.folder / expanded(node.text))


def absolute(node: Scalar) -> Path:
    """A path as it was meant where it was written."""
    return real(node.place.folder / expanded(node.text))
