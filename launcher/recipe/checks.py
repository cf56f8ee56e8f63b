"""What the schema alone cannot say: names and options against the catalog, and keys that do not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from launcher.recipe.catalog import Entry, Option, catalog
from launcher.recipe.checks_script import (
    absolute,
    check_env,
    check_script,
    check_secret_names,
    is_in_container,
    python_of,
    script_of,
)
from launcher.recipe.explain import show
from launcher.recipe.hints import NO_STRATEGY, did_you_mean, unknown_key_hint
from launcher.recipe.nodes import Entry as Written
from launcher.recipe.nodes import Findings, Keys, Scalar, Table, dotted, present, section_at
from launcher.recipe.schema import TARGET, Recipe
from launcher.recipe.targets import TargetFault, target_of
from launcher.recipe.typed import annotation_at, annotation_of, describe, fields_of, fits, section_of, typed


@dataclass(frozen=True)
class NamedKind:
    """A section that names something in `jobs/`."""

    keys: Keys
    kind: str
    """What the catalog calls it."""
    word: str
    """What a message calls one."""
    key: str = "name"
    """The key of the section that holds the name."""
    default: str | None = None
    """The name where the section gives none."""


NAMED = (
    NamedKind(("model",), "models", "model"),
    NamedKind(("data",), "datasets", "dataset"),
    NamedKind(("train", "task"), "tasks", "task"),
    NamedKind(("train", "optimizer"), "optimizers", "optimizer", default="adamw"),
    NamedKind(("train", "schedule"), "schedules", "schedule", default="constant"),
    NamedKind(("parallelism",), "strategies", "strategy", key="strategy", default="ddp"),
)

PARTS = ("model", "data", "train")
"""What a recipe without a script has."""
JOB_ONLY = (*PARTS, "parallelism", "checkpoint")
SCRIPT_ONLY = ("args", "resume", "preload", "progress", "python")


PROGRAMS = ("script", "module")


def named_entry(root: Table, named: NamedKind) -> Entry | None:
    """The thing in the catalog that a section names, or the user's own function, if there is one that can be read."""
    section = section_at(root, named.keys)
    if section is not None and TARGET in _own_keys(named) and present(section, TARGET):
        target = target_of(root, section)
        return target if isinstance(target, Entry) else None
    written = None if section is None else section.entries.get(named.key)
    name = named.default if written is None else written.value.text if isinstance(written.value, Scalar) else None
    return None if name is None else catalog(named.kind).get(name)


def options_of(root: Table) -> dict[Keys, list[str]]:
    """The options that each named section has, by what this recipe names in it."""
    entries = ((named.keys, named_entry(root, named)) for named in NAMED)
    return {keys: [option.name for option in entry.options] for keys, entry in entries if entry is not None}


def check_named(root: Table, failed: set[Keys], findings: Findings) -> None:
    """Names that the catalog does not have, options that what is named does not have, options of the wrong type."""
    for named in NAMED:
        section = section_at(root, named.keys)
        if section is None:
            continue
        _check_name(root, section, named, failed, findings)
        entry = named_entry(root, named)
        if entry is not None:
            _check_options(root, section, named=named, entry=entry, failed=failed, findings=findings)


def _check_name(root: Table, section: Table, named: NamedKind, failed: set[Keys], findings: Findings) -> None:
    written = section.entries.get(named.key)
    keys = (*named.keys, named.key)
    if TARGET in _own_keys(named):
        _check_one_of_two(root, section, named, findings)
        if written is not None and isinstance(written.value, Scalar) and written.value.text == TARGET:
            return  # the record of a run with a target says so
    if written is None or not isinstance(written.value, Scalar) or written.value.null or keys in failed:
        return
    names = catalog(named.kind)
    if written.value.text not in names:
        known = ", ".join(names) or "none"
        meant = NO_STRATEGY.get(written.value.text, "") if named.kind == "strategies" else ""
        hint = " ".join(filter(None, [meant or did_you_mean(written.value.text, names), f"({known})"]))
        findings.add(written.place, f"{dotted(keys)}: there is no {named.word} {written.value.text!r}", hint)


def _check_one_of_two(root: Table, section: Table, named: NamedKind, findings: Findings) -> None:
    """A name, or a function of the user's own."""
    word, name = dotted(named.keys), section.entries.get(named.key)
    if name is None or (isinstance(name.value, Scalar) and name.value.text == TARGET):
        if not present(section, TARGET):
            known = ", ".join(catalog(named.kind))
            hint = f"one of {known}; or `{TARGET}: package.module:function`, a {named.word} of your own"
            findings.add(root.entries[named.keys[0]].key, f"{word}.{named.key} is missing", hint)
        elif isinstance(fault := target_of(root, section), TargetFault):
            findings.add(section.entries[TARGET].place, f"{word}.{TARGET}: {fault.message}", fault.hint)
    elif present(section, TARGET):
        target = section.entries[TARGET]
        message = f"{word}.{TARGET}: {show(target.value)}, and {word}.{named.key} is {show(name.value)} ({name.place})"
        other = f"{{{TARGET}: {target.value.text}}}" if isinstance(target.value, Scalar) else "{...}"
        whole = f"; '{word}={other}' replaces the section" if target.key.layer > name.key.layer else ""
        findings.add(target.key, message, f"a {named.word} of ours or of your own: keep one of the two{whole}")


def _check_options(
    root: Table, section: Table, *, named: NamedKind, entry: Entry, failed: set[Keys], findings: Findings
) -> None:
    ours = _own_keys(named)
    for key, written in section.entries.items():
        keys = (*named.keys, key)
        option = entry.option(key)
        if key in ours or keys in failed:
            continue
        if option is None and entry.takes_any:
            continue
        if option is None:
            message = f"{dotted(keys)}: `{entry.name}` has no such option"
            hint = _whole_section_hint(section, written, named) or _option_hint(root, key, named, entry)
            findings.add(written.key, message, hint)
        else:
            _check_value(written, keys, option, findings)
    for option in entry.options:
        if option.required and option.name not in section.entries:
            place = root.entries[named.keys[0]].key
            hint = option.doc or describe(option.annotation)
            findings.add(place, f"{dotted((*named.keys, option.name))} is missing; `{entry.name}` needs it", hint)


def _check_value(written: Written, keys: Keys, option: Option, findings: Findings) -> None:
    wanted = option.annotation
    value = typed(written.value, wanted)
    if (is_other := not fits(value, wanted)) or not option.allows(value):
        default = "" if option.required else f"default: {option.default}"
        message = (
            f"{dotted(keys)}: {show(written.value)} is not {describe(wanted)}{'' if is_other else option.range_text}"
        )
        findings.add(written.place, message, option.doc or default)


def _whole_section_hint(section: Table, option: Written, named: NamedKind) -> str:
    """Of an option that was there before `model.name=X` was given after it: it belongs to what was named before."""
    name = section.entries.get(named.key)
    if name is None or not isinstance(name.value, Scalar) or name.place.layer <= option.place.layer:
        return ""
    keys, other = dotted(named.keys), f"{{{named.key}: {name.value.text}}}"
    return (
        f"`{keys}.{named.key}={name.value.text}` keeps the options that are there; '{keys}={other}' replaces them all"
    )


def _option_hint(root: Table, key: str, named: NamedKind, entry: Entry) -> str:
    if key == "name":
        return f"did you mean {named.key!r}?"
    options = [option.name for option in entry.options]
    valid = [*options, *sorted(_own_keys(named))]
    hint = unknown_key_hint(key, named.keys, valid, options_of(root))
    if hint.startswith("valid names"):
        return f"`{entry.name}` has {', '.join(options)}" if options else f"`{entry.name}` has no options"
    return f"{hint} ({', '.join(options)})" if options and hint.startswith("did you mean") else hint


def _own_keys(named: NamedKind) -> set[str]:
    section = section_of(annotation_at(Recipe, named.keys))
    return set() if section is None else set(fields_of(section))


def typed_options(root: Table) -> Iterator[tuple[Keys, object]]:
    """The options of every named section, as values of the types that they are declared with."""
    for named in NAMED:
        section, entry = section_at(root, named.keys), named_entry(root, named)
        if section is None or entry is None:
            continue
        for option in entry.options:
            if option.name in section.entries and option.name not in _own_keys(named):
                value = typed(section.entries[option.name].value, option.annotation)
                yield (*named.keys, option.name), list(value) if isinstance(value, tuple) else value


def check_whole(root: Table, findings: Findings) -> None:
    """A recipe trains something of ours, with model, data and train, or runs a script: one of the two."""
    check_env(root, findings)
    check_secret_names(root, findings)
    program = next((key for key in PROGRAMS if present(root, key)), None)
    if program is not None:
        _check_program(root, program, findings)
        return
    missing = [part for part in PARTS if not present(root, part)]
    if len(missing) == len(PARTS):
        hint = "a recipe has model, data and train, or a script or module"
        findings.add(root.place, "nothing to run: there is no model, data and train, and no script", hint)
    elif missing:
        given = ", ".join(part for part in PARTS if part not in missing)
        verb = "is" if len(missing) == 1 else "are"
        findings.add(root.place, f"{' and '.join(missing)} {verb} missing, beside {given}")
    for key in SCRIPT_ONLY:
        if _given(root, key) and len(missing) < len(PARTS):
            message = f"{key}: only a script has {key}, and this recipe trains a model"
            findings.add(root.entries[key].key, message, "leave it out, or name a `script` or `module`")


def _check_program(root: Table, program: str, findings: Findings) -> None:
    """A script or a module, with what goes with it."""
    place = root.entries[program].place
    for key in JOB_ONLY:
        if _given(root, key):
            message = f"{key}: this recipe runs a {program} ({place}), which is never combined with {key}"
            findings.add(root.entries[key].key, message, f"leave out {key}, or {program}")
    if program == "script" and present(root, "module"):
        message = f"module: this recipe runs a script ({place}) already"
        findings.add(root.entries["module"].key, message, "keep one of the two")
    check_script(root, findings)


def _given(root: Table, key: str) -> bool:
    """Whether a key says something else than its default does. The record of a run spells out every default."""
    if not present(root, key):
        return False
    field = Recipe.model_fields[key]
    value, default = typed(root.entries[key].value, annotation_of(field)), field.get_default()
    if not isinstance(default, BaseModel):
        return bool(value != default)
    try:
        return type(default).model_validate(value, strict=True) != default
    except ValidationError:
        return True


PATHS: tuple[Keys, ...] = (
    ("script",),
    ("workdir",),
    ("runs_dir",),
    ("checkpoint", "init_from"),
    ("python",),
    ("slurm", "template"),
    ("ssh", "config"),
)
"""Keys that hold paths. They are relative to the file that says them; on the command line, to the current folder."""
_MEANT: dict[Keys, Callable[[Scalar], Path]] = {("script",): script_of, ("python",): python_of}
"""Those of which a link has a meaning of its own."""


def written_paths(root: Table) -> Iterator[tuple[Keys, Path]]:
    """Every path that was written, absolute. `init_from` may be the id of a run as well, which has no slash."""
    for keys in PATHS:
        section = section_at(root, keys[:-1])
        entry = None if section is None else section.entries.get(keys[-1])
        if entry is None or not isinstance(entry.value, Scalar) or entry.value.null:
            continue
        if keys == ("python",) and is_in_container(root):
            continue
        if keys != ("checkpoint", "init_from") or "/" in entry.value.text or entry.value.text[:1] in (".", "~"):
            yield keys, _MEANT.get(keys, absolute)(entry.value)
