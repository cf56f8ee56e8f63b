"""The road of a sweep: plans of points, job arrays, slots of one machine, run directories that are made when needed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs_values as values

from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.slurm import SlurmExecutor
from launcher.executors.slurm_jobs import of_each, parse_sacct, parse_squeue
from launcher.planning.facts import Facts, Gpu, Interface
from launcher.planning.make import make_plan
from launcher.planning.plan import Plan, SbatchFlag
from launcher.planning.points import point_id
from launcher.planning.slots import Slot, divide, facts_of_slot, in_slot
from launcher.planning.slurm_facts import SlurmFacts
from launcher.planning.worker_env import group_of
from launcher.recipe.loader import LoadedRecipe, load_recipe
from launcher.road import Request, is_sweep
from launcher.runs.create import record_event
from launcher.runs.create_sweep import create_sweep
from launcher.runs.events import read_events
from launcher.runs.find import find_run, find_sweep
from launcher.runs.observed import Observation
from launcher.runs.sweep import SweepDir, SweepRecord, make_point, parse_tasks, point_lines, point_plan, read_sweep
from launcher.runs.sweep_table import SweepTable, failures, report_text, sweep_table, table_text
from launcher.sweeps import _lines, arrays_of, at_point, submit_arrays

RECIPE = """\
name: demo
model: {name: mlp, hidden: 64}
data: {name: synthetic, shape: 1x28x28, global_batch_size: 8}
train: {until: 20 steps}
"""
SWEEP = "demo-1130-0214-k7qz"
Load = Callable[..., LoadedRecipe]


@dataclasses.dataclass
class Place:
    """An executor that takes everything, and queues all but some arrays."""

    name: str = "slurm"
    refuses: int = -1
    sent: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    def check(self, plan: Plan) -> Sequence[Problem]:
        return []

    def submit_script(
        self, script: str, folder: Path, *, flags: Sequence[str] = (), known: Sequence[SbatchFlag] = ()
    ) -> str:
        if len(self.sent) == self.refuses:
            raise Refused([Problem(where="sbatch", message="Job violates accounting policy")])
        self.sent.append(tuple(flags))
        return str(100 + len(self.sent))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def _load(*sweep: str, text: str = RECIPE) -> LoadedRecipe:
        Path("a.yaml").write_text(text)
        return load_recipe(Path("a.yaml"), (), flags={"sweep": ("--sweep", sweep)})

    return _load


def facts(**changes: Any) -> Facts:
    loopback = Interface(name="lo", addresses=("127.0.0.1",), loopback=True)
    return values.facts(slurm=SlurmFacts(max_array_size=5), interfaces=(loopback,), **changes)


def plans(loaded: LoadedRecipe, executor: str) -> Callable[[Any], Plan]:
    def plan_of(point: Any) -> Plan:
        name = point_id(SWEEP, point.index)
        return make_plan(at_point(loaded, point), facts(), run_id=name, runs_dir="runs", executor=executor)

    return plan_of


def record(loaded: LoadedRecipe, *, executor: str = "slurm", **changes: Any) -> SweepRecord:
    keys = tuple(loaded.points[0].settings)
    known: dict[str, Any] = {"created_s": 1000.0, "metric": "eval/loss min", "max_parallel": None, "user": "ada"}
    points = len(loaded.points)
    return SweepRecord(sweep_id=SWEEP, name="demo", executor=executor, points=points, keys=keys, **{**known, **changes})


@pytest.fixture
def make(load: Load, tmp_path: Path) -> Callable[..., SweepDir]:
    """The directory of a sweep of these axes."""

    def _make(*sweep: str, executor: str = "slurm", **changes: Any) -> SweepDir:
        loaded = load(*sweep)
        plan_of = plans(loaded, executor)

        def planned(point: Any) -> Plan:
            return dataclasses.replace(plan_of(point), run_dir=str(tmp_path / "runs" / point_id(SWEEP, point.index)))

        first = planned(loaded.points[0])
        lines = list(_lines(loaded.points, first, planned, Place()))  # type: ignore[arg-type]
        return create_sweep(
            tmp_path / "runs" / SWEEP,
            record(loaded, executor=executor, **changes),
            first,
            lambda _: lines,
            recipe_text=loaded.text,
            command=["launch"],
            facts=facts(),
        )

    return _make


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("executor", ["local", "slurm"])
@pytest.mark.parametrize(
    "sweep",
    [
        ("train.optimizer.lr=1e-3,1e-2",),
        ("train.optimizer.name=adamw,sgd", "model.hidden=8,16"),
        ("train.schedule.name=cosine,constant", "train.schedule.warmup=2 steps,0 steps"),
        ("train.until=3 steps,1 epochs", "checkpoint.every=null,2 steps", "checkpoint.best=eval/loss min"),
        ("model.name=mlp,convnet",),
        ("train.accumulate=1,2", "train.seed=1,2"),
        ("data.global_batch_size=8,16",),
        ("faults.grace=10s,20s", "tracking.wandb.tags=[a],[b]"),
        ("network.timeout=1m,2m",),
    ],
)
def test_a_point_has_the_plan_that_it_would_have_alone(load: Load, executor: str, sweep: tuple[str, ...]) -> None:
    """What is put together from two lines of a file is what planning makes of the point's recipe."""
    text = RECIPE.replace("hidden: 64", "").replace("mlp, ", "mlp") if "model.name=mlp,convnet" in sweep else RECIPE
    loaded = load(*sweep, text=text)
    plan_of = plans(loaded, executor)
    first = plan_of(loaded.points[0])
    lines = [
        json.loads(json.dumps(line, default=vars))
        for line in _lines(loaded.points, first, plan_of, Place(executor))  # type: ignore[arg-type]
    ]
    from launcher.planning.points import plan_of as put_together

    base = json.dumps(vars(first), default=vars)
    for point, line in zip(loaded.points, lines, strict=True):
        assert Plan.from_json(json.dumps(put_together(base, lines[0], line))) == plan_of(point)


def test_an_image_sees_the_folder_that_all_points_share(load: Load, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    container = f"workdir: {tmp_path}\nslurm: {{container: {{runtime: apptainer, image: a.sif}}}}\n"
    loaded = load("args.lr=1,2", text=f"name: demo\nscript: train.py\nargs: {{lr: 0}}\n{container}")
    plan = plans(loaded, "slurm")(loaded.points[1])
    assert plan.slurm is not None
    bound = {word for before, word in itertools.pairwise(plan.slurm.srun) if before == "--bind"}
    assert {f"/home/ada/runs/{SWEEP}", f"/home/ada/runs/{SWEEP}.1"} <= bound


def test_points_are_a_group_in_wandb() -> None:
    assert group_of(f"{SWEEP}.12") == group_of(SWEEP) == SWEEP
    assert group_of("resnet-1.5-1130-0214-k7qz") == "resnet-1.5-1130-0214-k7qz"


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("data.global_batch_size=8,9", "9 does not divide by 2"),
        ("train.accumulate=1,3", "8 does not divide by 6"),
        ("model.hidden=4,5", "parallelism.tp: 2 does not divide model.hidden, which is 5"),
    ],
)
def test_what_planning_says_of_points_is_said_at_the_sweep(load: Load, axis: str, message: str) -> None:
    more = "resources: {nodes: 2}\n" + "parallelism: {tp: 2}\n" * axis.startswith("model")
    loaded = load(axis, text=RECIPE + more)
    plan_of = plans(loaded, "slurm")
    with pytest.raises(RecipeError) as caught:
        list(_lines(loaded.points, plan_of(loaded.points[0]), plan_of, Place()))  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert message in problem.message
    if axis.startswith("data"):
        assert problem.where == f"--sweep {axis}"


def test_tasks_of_an_array_ask_for_the_same(load: Load) -> None:
    loaded = load("resources.nodes=1,2")
    plan_of = plans(loaded, "slurm")
    with pytest.raises(RecipeError, match="point 1 asks for --nodes=2, which point 0 does not"):
        list(_lines(loaded.points, plan_of(loaded.points[0]), plan_of, Place()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (RECIPE, (), False),
        (RECIPE + "sweep: {}\n", (), True),
        ("extends: b.yaml\nname: x\n", (), True),
        (RECIPE, ("sweep.max_parallel=1",), True),
        ("extra: |\n  sweep: no\n", (), False),
        (RECIPE + "sweep: {}\n", ("sweep=null",), False),
        (RECIPE, ("sweep=null", "sweep.max_parallel=1"), True),
    ],
)
def test_a_sweep_is_told_from_a_run_by_the_text(
    load: Load, text: str, overrides: tuple[str, ...], expected: bool
) -> None:
    load()
    Path("a.yaml").write_text(text)
    Path("b.yaml").write_text("sweep:\n")
    assert is_sweep(Request(target="a.yaml", overrides=overrides)) is expected


# ---------------------------------------------------------------- job arrays


def arrays(load: Load, number: int, indices: Sequence[int] | None = None, **changes: Any) -> list[Any]:
    loaded = load(f"train.seed={','.join(map(str, range(number)))}")
    plan = plans(loaded, "slurm")(loaded.points[0])
    made = record(loaded, **changes)
    return list(arrays_of(Path("/runs") / SWEEP, made, plan, facts(), indices or range(number)))


def test_arrays_are_no_larger_than_the_site_allows(load: Load) -> None:
    """F045: MaxArraySize 5, a sweep of 12: three arrays, twelve distinct points."""
    made = arrays(load, 12)
    assert [(array.offset, array.tasks) for array in made] == [
        (0, (0, 1, 2, 3, 4)),
        (5, (0, 1, 2, 3, 4)),
        (10, (0, 1)),
    ]
    assert [array.flags for array in made] == [("--array=0-4",), ("--array=0-4",), ("--array=0-1",)]
    assert f"run_dir=/runs/{SWEEP}.$((SLURM_ARRAY_TASK_ID + 5))" in made[1].script
    assert f"#SBATCH --output=/runs/{SWEEP}/slurm/%A_%a.log" in made[1].script
    assert f"#SBATCH --job-name={SWEEP}\n" in made[1].script
    assert not any(array.waits for array in made)


def test_max_parallel_holds_for_all_arrays_together(load: Load) -> None:
    """F045: the arrays follow each other, so no more run than was said."""
    made = arrays(load, 12, max_parallel=2)
    assert [array.flags for array in made] == [("--array=0-4%2",), ("--array=0-4%2",), ("--array=0-1%2",)]
    assert [array.waits for array in made] == [False, True, True]


def test_only_some_points_go_on(load: Load) -> None:
    made = arrays(load, 12, [1, 3, 4, 11])
    assert [(array.offset, array.flags) for array in made] == [(0, ("--array=1,3-4",)), (10, ("--array=1",))]


def test_what_was_queued_before_a_refusal_is_said(load: Load, make: Callable[..., SweepDir]) -> None:
    """F045: the second of three arrays is refused."""
    sweep, place = make("train.seed=" + ",".join(map(str, range(12)))), Place(refuses=1)
    with pytest.raises(Refused) as caught:
        submit_arrays(sweep, place, arrays(load, 12, max_parallel=2), ())  # type: ignore[arg-type]
    first, second = caught.value.problems
    assert first.message == "Job violates accounting policy"
    assert (second.where, second.message) == (SWEEP, "queued before: 101 (5 of 12 points)")
    assert second.hint == f"the others: launch resume {SWEEP}"
    events = [event for event in read_events(sweep.path) if event["event"] == "array_submitted"]
    assert [(event["ref"], event["offset"], event["tasks"]) for event in events] == [("slurm:101", 0, "0-4")]


def test_arrays_after_each_other_depend_on_the_one_before(load: Load, make: Callable[..., SweepDir]) -> None:
    sweep, place = make("train.seed=" + ",".join(map(str, range(12)))), Place()
    refs = submit_arrays(sweep, place, arrays(load, 12, max_parallel=2), ())  # type: ignore[arg-type]
    assert place.sent[1:] == [
        ("--array=0-4%2", "--dependency=afterany:101"),
        ("--array=0-1%2", "--dependency=afterany:102"),
    ]
    assert (refs[4], refs[5], refs[11]) == ("slurm:101_4", "slurm:102_0", "slurm:103_1")
    make_point(sweep.point(11))
    assert read_events(sweep.point(11).path)[-1]["ref"] == "slurm:103_1"


def test_tasks_read_back() -> None:
    assert list(parse_tasks("0-3,7,9-10")) == [0, 1, 2, 3, 7, 9, 10]
    assert isinstance(SlurmExecutor.name, str)


def test_tasks_that_were_cancelled_before_they_began_have_one_line_for_all() -> None:
    """F045: as squeue and sacct of SLURM 22.05 have them."""
    squeue = parse_squeue("7|CANCELLED|N/A|N/A|UNLIMITED||JobArrayTaskLimit\n7_0|RUNNING|N/A|N/A|UNLIMITED|n1|None\n")
    assert {ident: seen.state for ident, seen in of_each(["7_0", "7_1", "8_1"], squeue).items()} == {
        "7_0": "RUNNING",
        "7_1": "CANCELLED",
    }
    sacct = parse_sacct("7_0|COMPLETED|0:0||n1\n7_[1-2,5%1]|CANCELLED by 0|0:0||\n")
    assert {ident: seen.state for ident, seen in of_each(["7_0", "7_2", "7_3", "7_5"], sacct).items()} == {
        "7_0": "COMPLETED",
        "7_2": "CANCELLED",
        "7_5": "CANCELLED",
    }
    waiting = {"7": Observation(alive=True, state="PENDING")}
    assert of_each(["7_1"], waiting) == {}


# ---------------------------------------------------------------- slots


def test_the_machine_is_divided_into_equal_parts(load: Load) -> None:
    recipes = [point.recipe for point in load("train.seed=1,2,3,4,5").points]
    machine = values.facts(cpus=(0, 1, 2, 3, 4, 5, 6, 7))
    assert [slot.cpus for slot in divide(machine, recipes, on_gpus=False, at_most=None)] == [
        *((0,), (1,), (2,), (3,), (4,)),
    ]
    assert [slot.cpus for slot in divide(machine, recipes, on_gpus=False, at_most=2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    two = [
        recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"threads": 3})})
        for recipe in recipes
    ]
    assert [slot.cpus for slot in divide(machine, two, on_gpus=False, at_most=None)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [slot.cpus for slot in divide(values.facts(cpus=(0,)), two, on_gpus=False, at_most=None)] == [(0,)]


def test_gpus_are_set_apart_too(load: Load) -> None:
    recipes = [point.recipe for point in load("train.seed=1,2,3,4,5").points]
    gpus = tuple(Gpu(index=index, name="H100", memory_bytes=80 << 30) for index in range(4))
    machine = values.facts(cpus=tuple(range(8)), gpus=gpus)
    assert [slot.gpus for slot in divide(machine, recipes, on_gpus=True, at_most=None)] == [(0, 1, 2, 3)]
    assert [slot.gpus for slot in divide(machine, recipes, on_gpus=True, at_most=2)] == [(0, 1), (2, 3)]
    ones = [
        recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"nproc_per_node": 1})})
        for recipe in recipes
    ]
    slots = divide(machine, ones, on_gpus=True, at_most=None)
    assert [slot.gpus for slot in slots] == [(0,), (1,), (2,), (3,)]
    assert [slot.cpus for slot in slots] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert facts_of_slot(machine, slots[2]).gpus == (gpus[2],)
    for key, number in {
        "parallelism: {strategy: single}\n": 4,
        "parallelism: {strategy: split}\n": 1,
        "resources: {device: 'cuda:1'}\n": 1,
    }.items():
        alone = [load("train.seed=1,2", text=RECIPE + key).recipe] * 4
        assert len(divide(machine, alone, on_gpus=True, at_most=None)) == number


def test_where_a_quota_holds_nobody_is_pinned(load: Load) -> None:
    recipes = [point.recipe for point in load("train.seed=1,2,3,4").points]
    slots = divide(values.facts(cpus=tuple(range(8)), cpu_quota=2.0), recipes, on_gpus=False, at_most=None)
    assert [(slot.cpus, slot.cpu_quota) for slot in slots] == [((), 1.0), ((), 1.0)]


def test_a_plan_moves_to_another_slot(load: Load) -> None:
    plan = plans(load("train.seed=1,2"), "local")(load("train.seed=1,2").points[0])
    moved = in_slot(plan, Slot(cpus=(0, 1), gpus=()), Slot(cpus=(6, 7), gpus=()))
    assert (plan.nodes[0].cpus, moved.nodes[0].cpus) == ((0, 1), (6, 7))


# ---------------------------------------------------------------- run directories


def test_a_point_gets_an_ordinary_run_directory_when_it_is_asked_for(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.optimizer.lr=1e-3,1e-2")
    assert [path.name for path in sweep.path.parent.iterdir()] == [SWEEP]
    run = find_run(f"{SWEEP}.1")
    assert run == sweep.point(1)
    assert json.loads(run.plan.read_text())["run_id"] == f"{SWEEP}.1"
    assert run.recipe.read_text() == RECIPE
    assert run.token.stat().st_mode & 0o777 == 0o600
    again = load_recipe(run.resolved).recipe
    assert again.train is not None
    assert again.train.optimizer.options == {"lr": 1e-2}
    assert again.sweep is None
    assert sorted(path.name for path in sweep.path.parent.iterdir()) == [SWEEP, f"{SWEEP}.1"]
    assert find_run("k7qz.1") == run
    assert find_run(str(run.path)) == run


def test_many_who_make_the_same_point_make_one(make: Callable[..., SweepDir]) -> None:
    """F097: what is done once is done once, whoever begins."""
    sweep = make("train.seed=1,2,3")
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(make_point(sweep.point(2)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [True] * 8
    assert sorted(path.name for path in sweep.path.parent.iterdir()) == [SWEEP, f"{SWEEP}.2"]


def test_a_sweep_is_no_run_and_has_no_more_points_than_it_has(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.seed=1,2")
    assert find_sweep("last") == find_sweep("k7qz") == find_sweep(str(sweep.path)) == sweep
    assert find_sweep(f"{SWEEP}.1") is None
    with pytest.raises(RecipeError, match=f"{SWEEP} is a sweep"):
        find_run(SWEEP)
    with pytest.raises(RecipeError, match=r"has no point 2\n +hint: it has the points 0 to 1"):
        find_run(f"{SWEEP}.2")


def test_a_thousand_points_are_small(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.seed=" + ",".join(map(str, range(1000))))
    assert len(list(point_lines(sweep))) == 1000
    assert point_plan(sweep, 999) is not None
    assert point_plan(sweep, 1000) is None
    assert len(list(sweep.path.rglob("*"))) < 20


# ---------------------------------------------------------------- the table


def finish(sweep: SweepDir, index: int, state: str, **result: Any) -> None:
    run = sweep.point(index)
    make_point(run)
    known = {
        "cause": "done",
        "exit_code": 0 if state == "SUCCEEDED" else 1,
        "reason": "",
        "total_steps": 20,
        "step": 20,
    }
    run.result.write_text(json.dumps({"state": state, **known, "time": {"total_s": 4.0}, **result}))


def look(sweep: SweepDir, seen: Mapping[str, Observation]) -> tuple[SweepTable, list[list[str]]]:
    asked: list[list[str]] = []

    def observe(refs: Sequence[str]) -> Mapping[str, Observation]:
        asked.append(list(refs))
        return {ref: seen.get(ref, Observation(alive=False)) for ref in refs}

    known = read_sweep(sweep)
    assert known is not None
    return sweep_table(sweep, known, observe, now_s=2000.0), asked


def test_a_sweep_of_another_version_or_a_spoiled_one_is_not_read(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.optimizer.lr=1e-4,1e-3")
    known = json.loads(sweep.record.read_text())
    for changed in (known | {"version": 2}, known | {"unheard": "of"}, [], {}):
        sweep.record.write_text(json.dumps(changed))
        assert read_sweep(sweep) is None
    sweep.record.write_text(json.dumps(known))
    assert read_sweep(sweep) is not None


def test_the_table_has_the_best_first_and_asks_once(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.optimizer.lr=1e-4,1e-3,1e-2,1e-1,1")
    record_event(sweep.run, "array_submitted", ref="slurm:7", offset=0, tasks="0-4")
    finish(sweep, 1, "SUCCEEDED", metrics={"eval/loss": 0.5})
    finish(sweep, 2, "SUCCEEDED", metrics={"eval/loss": 0.25})
    finish(sweep, 4, "FAILED", cause="nan")
    make_point(sweep.point(3))
    table, asked = look(sweep, {"slurm:7_0": Observation(alive=True, state="PENDING", reason="Priority")})
    assert len(asked) == 1
    assert sorted(asked[0]) == ["slurm:7_0", "slurm:7_3"]
    assert [(row.index, row.state) for row in table.rows] == [
        (0, "PENDING"),
        (1, "SUCCEEDED"),
        (2, "SUCCEEDED"),
        (3, "SUBMITTED"),
        (4, "FAILED"),
    ]
    assert table_text(table).splitlines()[:5] == [
        f"{SWEEP}   1 PENDING, 1 SUBMITTED, 2 SUCCEEDED, 1 FAILED",
        "POINT  STATE      train.optimizer.lr  eval/loss  STEP   TIME  WHY",
        "2      SUCCEEDED  1e-2                0.25       20/20  4.0s",
        "1      SUCCEEDED  1e-3                0.5        20/20  4.0s",
        "0      PENDING    1e-4                                        Priority",
    ]


def test_a_table_without_a_better_end_says_why_it_is_not_sorted(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.optimizer.lr=1e-4,1e-3", metric=None)
    finish(sweep, 0, "SUCCEEDED", metrics={"eval/loss": 0.5})
    assert "in the order" not in table_text(look(sweep, {})[0]), "there is nothing to compare"
    finish(sweep, 1, "SUCCEEDED", metrics={"eval/loss": 0.25})
    table, _ = look(sweep, {})
    why = "the recipe does not say which end of eval/loss is better (sweep.metric)"
    assert table_text(table).splitlines()[-1] == f"in the order of the points: {why}"
    assert why in report_text(table, lambda row: "")


def test_what_nothing_will_begin_is_unstarted_and_what_was_stopped_is_cancelled(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.seed=1,2,3")
    assert {row.state for row in look(sweep, {})[0].rows} == {"UNSTARTED"}
    record_event(sweep.run, "array_submitted", ref="slurm:7", offset=0, tasks="0-1")
    states = [row.state for row in look(sweep, {"slurm:7_1": Observation(alive=False, state="CANCELLED")})[0].rows]
    assert states == ["UNSTARTED", "CANCELLED", "UNSTARTED"]
    record_event(sweep.run, "cancel_requested", host="here", user="ada")
    assert [row.state for row in look(sweep, {})[0].rows] == ["CANCELLED", "CANCELLED", "UNSTARTED"]


def test_the_report_groups_failures_by_cause(make: Callable[..., SweepDir]) -> None:
    sweep = make("train.seed=1,2,3,4")
    finish(sweep, 0, "SUCCEEDED", metrics={"eval/loss": 0.5})
    finish(sweep, 1, "FAILED", cause="oom")
    finish(sweep, 2, "FAILED", cause="worker_error")
    finish(sweep, 3, "FAILED", cause="oom")
    table, asked = look(sweep, {})
    assert asked == []
    assert {why: [row.index for row in rows] for why, rows in failures(table).items()} == {
        "FAILED: CUDA out of memory": [1, 3],
        "FAILED: a worker failed": [2],
    }
    assert report_text(table, lambda row: f"said by {row.index}").splitlines() == [
        f"{SWEEP}   4 points: 1 SUCCEEDED, 3 FAILED",
        "  FAILED: CUDA out of memory   2 points: 1,3",
        f"    {SWEEP}.1: said by 1",
        "  FAILED: a worker failed   1 point: 2",
        f"    {SWEEP}.2: said by 2",
        f"  best      {SWEEP}.0   eval/loss min 0.5   train.seed=1",
        f"Next   launch resume {SWEEP}   (runs 3 points again)",
    ]
