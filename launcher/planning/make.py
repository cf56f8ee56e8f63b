"""From a recipe and the facts of a machine to a plan. Pure: no clock, no environment, no files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from launcher.errors import Problem, RecipeError, Refused
from launcher.planning.codeplan import with_code
from launcher.planning.decisions import Decisions, decide
from launcher.planning.parallel import holds_whole
from launcher.planning.plan import WITH_CLOCK, Limits, Plan, Value, leaves, local_agent_argv, slurm_agent_argv
from launcher.planning.program import plan_worker
from launcher.planning.topology import Finding, Remarks
from launcher.planning.torchrun import srun_line, torchrun_lines

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.loader import LoadedRecipe
    from launcher.recipe.schema import Recipe

JOIN_TIMEOUT_S = 300.0


def make_plan(loaded: LoadedRecipe, facts: Facts, *, run_id: str, runs_dir: str, executor: str = "local") -> Plan:
    """Expand a recipe into every node, rank, variable and limit. Pure: same arguments, same plan.

    Raises RecipeError with all problems at once, Refused where the interpreter that it names cannot run it.
    """
    remarks = Remarks()
    refusals: list[Finding] = []
    decided = decide(
        loaded, facts, run_id=run_id, runs_dir=runs_dir, executor=executor, remarks=remarks, refusals=refusals
    )
    document = loaded.recipe.model_dump(mode="json", by_alias=True)
    if remarks.problems:
        raise problems_of(remarks, loaded)
    if refusals:
        raise Refused([_placed(finding, loaded) for finding in refusals])
    plan = _written_down(loaded, facts, decided, document, run_id=run_id, executor=executor, remarks=remarks)
    # By hand it is the user's own file that runs, so these lines come first.
    plan = dataclasses.replace(plan, torchrun=tuple(_by_hand(plan, loaded, facts, decided)))
    return with_code(plan, facts.code)


def problems_of(remarks: Remarks, loaded: LoadedRecipe) -> RecipeError:
    """All problems as one error, each with its place, in the order of the schema."""
    document = loaded.recipe.model_dump(mode="json", by_alias=True)
    order = {key: index for index, (key, _) in enumerate(leaves(document))}
    findings = sorted(remarks.problems, key=lambda finding: _rank(finding.key, order))
    return RecipeError([_placed(finding, loaded) for finding in findings])


def _written_down(
    loaded: LoadedRecipe,
    facts: Facts,
    decided: Decisions,
    document: dict[str, Any],
    *,
    run_id: str,
    executor: str,
    remarks: Remarks,
) -> Plan:
    """The plan, but for the lines to run it by hand and the code."""
    recipe, paths, layout = loaded.recipe, decided.paths, decided.layout
    engine = decided.interpreters.engine
    return Plan(
        run_id=run_id,
        name=recipe.name,
        executor=executor,
        run_dir=paths.run_dir,
        recipe_source=None if loaded.source is None else str(loaded.source),
        overrides=loaded.overrides,
        recipe=document,
        values=(*_place(loaded), *_values(document, loaded, decided)),
        nodes=layout.nodes,
        nproc_per_node=layout.device.nproc_per_node,
        device=layout.device.name,
        device_reason=layout.device.reason,
        backend=layout.device.backend,
        interface=layout.network.interface,
        threads=layout.threads.count,
        master_port=None if recipe.network.master_port == "auto" else recipe.network.master_port,
        worker=plan_worker(
            recipe,
            folder=paths.folder,
            cwd=paths.cwd,
            python=decided.interpreters.python,
            fresh=engine.name == "torchrun",
            placeholders=decided.placeholders,
        ),
        engine=engine.name,
        engine_reason=engine.reason,
        secrets=tuple(dict.fromkeys((*recipe.secrets, *_keys(recipe, decided)))),
        setup=(*layout.network.setup, *recipe.setup),
        env=decided.env,
        env_unset=layout.network.unset,
        limits=_limits(recipe, facts, decided),
        rescue=decided.rescue,
        resumable=decided.resumable,
        preflight=recipe.faults.preflight and recipe.resources.max_nodes > 1,
        agent_argv=_agent_argv(decided),
        slurm=decided.slurm,
        hosts=decided.hosts,
        sky=decided.sky,
        min_nodes=recipe.resources.min_nodes if recipe.resources.is_elastic else None,
        prepare=recipe.prepare,
        internet=recipe.internet,
        watch_s=None if recipe.tracking.watch is None else recipe.tracking.watch.time_s,
        scratch=recipe.scratch,
        torchrun=(),
        notes=(*loaded.notes, *_notes(recipe, decided), *remarks.notes),
    )


def _keys(recipe: Recipe, decided: Decisions) -> tuple[str, ...]:
    """Of trackers, for nodes that do not inherit this environment; where they are set here."""
    return () if decided.hosts is None or recipe.tracking.wandb.mode == "disabled" else ("WANDB_API_KEY",)


def _agent_argv(decided: Decisions) -> tuple[str, ...]:
    python, run_dir = decided.interpreters, decided.paths.run_dir
    if decided.slurm is None:  # on hosts: what each node's own line is made of
        return local_agent_argv(python.python, run_dir, own=python.own)
    return slurm_agent_argv(python.launcher_python, run_dir, "batch")


def _by_hand(plan: Plan, loaded: LoadedRecipe, facts: Facts, decided: Decisions) -> Iterator[str]:
    if plan.sky is not None:
        return iter(())  # by hand it is SkyPilot's own command
    overrides = _overrides(loaded, facts, plan)
    torchrun = ("torchrun",) if decided.interpreters.own else (plan.worker.python, "-m", "torch.distributed.run")
    how = torchrun_lines if plan.slurm is None else srun_line
    return how(plan, torchrun=torchrun, overrides=overrides, cwd=facts.cwd)


def _placed(finding: Finding, loaded: LoadedRecipe) -> Problem:
    """A key of the recipe is shown at its line; a variable of the user's is in the environment."""
    place = "environment" if finding.key.isupper() else loaded.where(finding.key)
    return Problem(where=place, message=finding.message, hint=finding.hint)


def _rank(key: str, order: Mapping[str, int]) -> int:
    """Where a key, or what it is a part of, stands in the schema."""
    while key and key not in order:
        key = key.rpartition(".")[0]
    return order.get(key, -1)


def _limits(recipe: Recipe, facts: Facts, decided: Decisions) -> Limits:
    limits = recipe.limits
    return Limits(
        max_restarts=recipe.faults.max_restarts if decided.resumable else 0,
        grace_s=decided.grace_s,
        network_timeout_s=recipe.network.timeout.time_s,
        **_hangs(recipe, resumable=decided.resumable),
        join_timeout_s=JOIN_TIMEOUT_S,
        wall_s=None if limits.wall is None else limits.wall.time_s,
        gpu_hours=limits.gpu_hours,
        until_s=facts.until_s,
    )


def _hangs(recipe: Recipe, *, resumable: bool) -> dict[str, Any]:
    """Limits of a hang: only where something shows that the workers get on.

    A script that cannot resume would lose all it has done; a person may know better.
    """
    faults, has_clock = recipe.faults, not recipe.is_script or recipe.progress is not None
    asked, how = faults.hang_timeout, faults.on_hang
    return {
        "hang_timeout_s": None if asked is None or asked == "auto" else asked.time_s,
        "learns_hang_timeout": asked == "auto",
        # whether a script calls launch_client.progress is seen when it does
        "on_hang": how if how != "auto" else "report" if not resumable else "restart" if has_clock else WITH_CLOCK,
    }


def _why_rescue(recipe: Recipe) -> str:
    is_cut = not recipe.is_script and not holds_whole(recipe)
    return "auto: each rank has a part of the state alone" if is_cut else "auto"


def _place(loaded: LoadedRecipe) -> Iterator[Value]:
    """Where it runs, where somebody said so."""
    if loaded.on is not None:
        yield Value(key="on", value=loaded.on[0], origin=loaded.on[1])


def _values(document: Mapping[str, Any], loaded: LoadedRecipe, decided: Decisions) -> Iterator[Value]:
    """Every value of the recipe in the order of the schema; what `auto` became, and why."""
    layout, slurm = decided.layout, decided.slurm
    device, network, threads = layout.device, layout.network, layout.threads
    grace = "auto" if slurm is None else f"auto: KillWait {slurm.kill_wait_s:g} s - 5 s"
    if decided.sky is not None:
        grace = "auto: SkyPilot kills 30 s after its TERM - 5 s"
    resolved: dict[str, tuple[object, str]] = {
        "resources.nproc_per_node": (device.nproc_per_node, device.nproc_reason or "auto"),
        "resources.device": (device.name, f"auto: {device.reason}"),
        "resources.threads": (threads.count, threads.origin),
        "network.preset": (network.preset, network.preset_origin),
        "network.interface": (network.interface, network.interface_origin),
        "network.master_port": ("auto", "auto: a free port for each attempt"),
        "faults.grace": (f"{decided.grace_s:.0f}s", grace),
        "faults.rescue": (decided.rescue, _why_rescue(loaded.recipe)),
        "faults.hang_timeout": ("auto", "auto: learned from the times of the steps"),
        "faults.on_hang": (_hangs(loaded.recipe, resumable=decided.resumable)["on_hang"], "auto"),
    }
    if slurm is not None:
        resolved["slurm.continue"] = slurm.continue_how, f"auto: {slurm.continue_reason}"
    for key, value in leaves(document):
        if value == "auto" and key in resolved:
            yield Value(key=key, value=resolved[key][0], origin=resolved[key][1])
        else:
            yield Value(key=key, value=value, origin=loaded.origins.get(key, "default"))


def _notes(recipe: Recipe, decided: Decisions) -> Iterator[str]:
    resources, device, engine = recipe.resources, decided.layout.device, decided.interpreters.engine
    nodes = resources.max_nodes
    if decided.slurm is None and decided.hosts is None and decided.sky is None and nodes > 1:
        yield f"{nodes} nodes on this machine: {nodes} agents"
    if resources.is_elastic:
        yield (
            f"{resources.nodes} nodes: goes on with {resources.min_nodes} or more when others are lost, and takes them "
            f"in again; the lines to run it by hand have a fixed size, all {nodes}"
        )
        if "{nodes}" in str(recipe.args):
            yield f"args: {{nodes}} is {nodes}, also while some are lost: WORLD_SIZE says how many ranks there are"
    if resources.device == "auto":
        yield f"device {device.name}: {device.reason}"
    if engine.reason:
        yield engine.reason
    if not recipe.internet and not recipe.prepare and recipe.data is not None and recipe.data.options.get("full"):
        yield "data.full downloads the dataset, and nodes have no internet: download it before, by lines of `prepare`"
    if engine.name == "torchrun" and (recipe.preload or not recipe.is_script):
        yield "nothing is preloaded: torchrun starts each worker in a fresh interpreter"
    if not decided.resumable and recipe.faults.max_restarts:
        yield (
            "a failure ends the run: nothing is restarted without `resume:`, "
            "since a start from zero over old outputs is worse than a stop"
        )


def _overrides(loaded: LoadedRecipe, facts: Facts, plan: Plan) -> list[str]:
    """All that separates the recipe file from the recipe of the plan: overrides, and flags written as such."""
    resolved = dict(leaves(plan.recipe))
    flags = [f"{key}={resolved[key]}" for key, origin in loaded.origins.items() if origin.startswith("flag ")]
    if plan.device == "cpu" and loaded.recipe.resources.device == "auto" and facts.gpus:
        flags.append("resources.device=cpu")  # a worker alone would see the GPUs that the plan leaves out
    if plan.device == "cuda" and ":" in loaded.recipe.resources.device:
        flags.append("resources.device=cuda")  # of those that a worker sees by hand it is the first, and the only one
    return [*loaded.overrides, *(flag for flag in flags if flag not in loaded.overrides)]
