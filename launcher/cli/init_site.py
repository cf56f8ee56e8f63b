"""`launch init-site`: a profile of the cluster that this machine belongs to, from what SLURM says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.planning.site import Accounts
    from launcher.planning.slurm_facts import SlurmFacts

_ASK_LIMIT_S = 10.0


@click.command("init-site")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print it, write nothing.")
@click.option("--force", is_flag=True, help="Replace the profile of this name.")
def init_site(name: str | None, to_stdout: bool, force: bool) -> int:
    """Write a profile of this cluster, for `--on NAME`; by default NAME is what SLURM calls the cluster.

    It goes to the user's own profiles, ~/.config/launcher/profiles. One that is there stays, without --force: the
    difference is shown.
    """
    from launcher import shipped
    from launcher.planning.site import site_profile
    from launcher.planning.slurm_facts import SlurmProbe
    from launcher.recipe.whereto import user_folder

    slurm = _answering(SlurmProbe().answer(limit_s=_ASK_LIMIT_S))
    name = _checked(name or slurm.cluster or "cluster")
    schema = str((shipped.PROFILES / "schema.json").resolve())
    text = site_profile(slurm, _accounts(slurm), name=name, schema=schema)
    if to_stdout:
        click.echo(text, nl=False)
        return 0
    path = user_folder() / "profiles" / f"{name}.yaml"
    if not _write(path, text, force=force):
        click.echo(f"{path} says so already")
        return 0
    click.echo(f"written: {path}")
    click.echo(f"Next   launch RECIPE --on {name} --dry-run      look into it: partition, time, setup, runs_dir")
    click.echo(f"       `on: {name}` in {user_folder() / 'config.yaml'} makes it the default")
    return 0


def _answering(slurm: SlurmFacts | None) -> SlurmFacts:
    from launcher.errors import Problem, Refused

    if slurm is None:
        message = "there is no SLURM on this machine: no `scontrol` on the PATH"
        raise Refused([Problem(where="init-site", message=message, hint="call it on a login node of the cluster")])
    if slurm.fault:
        message = f"SLURM does not answer: {slurm.fault}"
        raise Refused([Problem(where="init-site", message=message, hint="is this a login node? `scontrol ping` asks")])
    return slurm


def _checked(name: str) -> str:
    """A name that `--on` finds. Raises RecipeError for another one."""
    import re

    from launcher.errors import Problem, RecipeError
    from launcher.executors.base import EXECUTORS

    if name in EXECUTORS:
        message = f"{name!r} is an executor, so `--on {name}` would never find this profile"
        raise RecipeError([Problem(where="NAME", message=message, hint="launch init-site ANOTHER_NAME")])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name) or name.endswith((".yaml", ".yml")):
        message = f"{name!r} is not the name of a profile: letters, digits, `.`, `_`, `-`, without .yaml"
        raise RecipeError([Problem(where="NAME", message=message, hint="as in `launch init-site lab`")])
    return name


def _accounts(slurm: SlurmFacts) -> Accounts:
    """What the user may charge jobs to, where the cluster keeps accounts."""
    import getpass
    import subprocess

    from launcher.planning.site import Accounts, parse_accounts

    if slurm.accounting is False:
        return Accounts()
    user = getpass.getuser()
    said = []
    for what in (("assoc", f"user={user}", "format=Account,QOS"), ("user", user, "format=DefaultAccount")):
        argv = ["sacctmgr", "-nP", "show", *what]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_LIMIT_S, check=False)
        except FileNotFoundError:
            return Accounts(fault="there is no `sacctmgr` here")
        except subprocess.TimeoutExpired:
            return Accounts(fault=f"`sacctmgr` does not answer within {_ASK_LIMIT_S:g} s")
        if done.returncode:
            first = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            return Accounts(fault=f"`sacctmgr`: {first}")
        said.append(done.stdout)
    return parse_accounts(*said)


def _write(path: Path, text: str, *, force: bool) -> bool:
    """Write it where there is none, or by force; False where the same is there. Raises Refused, with the difference."""
    from launcher.errors import Problem, Refused
    from launcher.recipe.paths import is_file

    try:
        if is_file(path) and not force:
            there = path.read_text("utf-8", errors="replace")
            if there == text:
                return False
            _show_difference(path, there, text)
            message = "there is a profile of this name already, and it differs as shown"
            hint = f"--force replaces it; `launch init-site OTHER_NAME` writes another one, --stdout none; {path}"
            raise Refused([Problem(where=path.stem, message=message, hint=hint)])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise Refused([Problem(where=str(path), message=f"cannot be written: {error.strerror}")]) from error
    return True


def _show_difference(path: Path, there: str, text: str) -> None:
    import difflib

    lines = difflib.unified_diff(
        there.splitlines(), text.splitlines(), str(path), "what SLURM says now", lineterm="", n=1
    )
    for line in lines:
        click.echo(line)
