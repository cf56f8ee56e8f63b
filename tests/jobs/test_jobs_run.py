from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Start, free_port
from tiny import tiny

from jobs.folders import complete
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

LINEAR = {"name": "mlp", "in_features": 20, "layers": 0, "classes": 4}

DATASETS = """
import os, signal, time, torch
from jobs.data.base import Data, TensorSamples
from jobs.registry import dataset

class Slow:
    def prepare(self):
        open(os.environ["PREPARING"], "w").close()
        time.sleep(float(os.environ["PREPARE_S"]))
    def load(self):
        if os.environ.get("STOP_IN_LOAD") == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGTERM)
        inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
        return Data(TensorSamples(inputs, (inputs[:, 0] > 0).long()))

@dataset("slow")
def slow(): return Slow()

class Poisoned(Slow):
    def prepare(self): ...
    def load(self):
        data = super().load()
        data.train._inputs[40] = float("nan")
        return data

@dataset("poisoned")
def poisoned(): return Poisoned()

class Told(TensorSamples):
    def __getitems__(self, indices):
        if os.environ["STOP_IN_EVAL"] == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitems__(indices)

class Long(Slow):
    # evaluated in three batches; a rank is told to stop in the first
    def load(self):
        data = super().load()
        return Data(data.train, Told(torch.randn(2500, 20), torch.zeros(2500, dtype=torch.int64)))

@dataset("long")
def long(): return Long()
"""


@pytest.fixture
def datasets(tmp_path: Path) -> list[str]:
    path = tmp_path / "datasets.py"
    path.write_text(DATASETS)
    return [str(path)]


def slow(name: str = "slow", **sections: Any) -> dict[str, Any]:
    recipe = tiny(**sections)
    recipe["data"] = {"name": name, "global_batch_size": 8}
    recipe["train"] = {"until": "24 steps", **sections.get("train", {})}
    return recipe


def weights_of(start: Start, run_dir: Path, recipe: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The weights at the end of a run."""
    import torch

    from jobs.state import open_tensors, read_tensors

    group = start(run_dir, recipe, ranks=ranks)
    assert set(group.wait()) == {0}, group.log()
    path = run_dir / "checkpoints" / complete(run_dir / "checkpoints")[-1]
    reader = open_tensors(path)
    state = {key: torch.empty(meta.size) for key, meta in reader.tensors.items() if key.startswith("model/")}
    read_tensors(reader, path, state, None)
    return state


def test_a_stop_leaves_at_one_step_and_the_resumed_run_ends_the_same(start: Start, tmp_path: Path) -> None:
    recipe = tiny()
    whole = start(tmp_path / "whole", recipe)
    assert whole.wait() == [0, 0], whole.log()
    stopped = start(tmp_path / "run", recipe)
    stopped.until_step(50)
    stopped.signal(signal.SIGTERM, 1)  # one rank alone is told: all leave
    assert stopped.wait() == [75, 75], stopped.log()
    step = stopped.event("summary")["step"]
    assert stopped.log().splitlines()[-1] == f"stopped at step {step}"
    assert complete(stopped.run_dir / "checkpoints")[-1] == f"step-{step}"
    assert [record["step"] for record in read_metrics(stopped.metrics)] == list(range(1, step + 1))
    resumed = start(tmp_path / "run", recipe, attempt=2)
    assert resumed.wait() == [0, 0], resumed.log()
    assert resumed.weights == whole.weights
    assert resumed.event("training_started")["step"] == step


@pytest.mark.parametrize("bucket_cap_mb", [None, 1])
@pytest.mark.parametrize("told", [0, 1])
def test_a_stop_of_one_rank_in_an_evaluation_is_everybodys(
    start: Start, tmp_path: Path, datasets: list[str], told: int, bucket_cap_mb: int | None
) -> None:
    """Where gradients carry the messages of the steps (no option of ddp is given), those of an evaluation go alone."""
    options = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    recipe = slow("long", train={"eval_every": "4 steps"}, parallelism={"strategy": "ddp", **options})
    env = {"PREPARING": os.devnull, "PREPARE_S": "0", "STOP_IN_EVAL": str(told)}
    ranks = start(tmp_path / "run", recipe, load=datasets, env=env)
    assert ranks.wait() == [75, 75], ranks.log()
    assert ranks.log().splitlines()[-1] == "stopped at step 4"
    assert complete(ranks.run_dir / "checkpoints")[-1] == "step-4"


def test_a_finished_run_started_again_is_complete_already(start: Start, tmp_path: Path) -> None:
    """F022: the budget is total; nothing is trained again."""
    recipe = tiny(train={"until": "30 steps", "eval_every": None})
    first = start(tmp_path / "run", recipe)
    assert first.wait() == [0, 0], first.log()
    times = first.event("summary")["times"]
    for attempt in (2, 3):
        again = start(tmp_path / "run", recipe, attempt=attempt)
        assert again.wait() == [0, 0], again.log()
        assert "already complete: 30/30 steps in step-30" in again.log()
        assert again.log().splitlines()[-1] == f"weights_sha256 {first.weights}"
        summary = again.event("summary")
        assert (summary["attempt"], summary["step"], summary["times"]) == (attempt, 30, times)
        assert summary["metrics"].keys() == {"eval/loss", "eval/accuracy"}
    assert [record["step"] for record in read_metrics(first.metrics)] == list(range(1, 31))


def test_a_stop_before_the_first_step_saves_it(start: Start, tmp_path: Path, datasets: list[str]) -> None:
    env = {"PREPARING": os.devnull, "PREPARE_S": "0"}
    whole = start(tmp_path / "whole", slow(), load=datasets, env=env)
    ranks = start(tmp_path / "run", slow(), load=datasets, env={**env, "STOP_IN_LOAD": "1"})
    assert whole.wait() == [0, 0], whole.log()
    assert ranks.wait() == [75, 75], ranks.log()
    assert complete(ranks.run_dir / "checkpoints") == ["step-0"]
    resumed = start(tmp_path / "run", slow(), attempt=2, load=datasets, env=env)
    assert resumed.wait() == [0, 0], resumed.log()
    assert resumed.weights == whole.weights


def test_a_stop_while_data_is_prepared_leaves_at_once(start: Start, tmp_path: Path, datasets: list[str]) -> None:
    preparing = tmp_path / "preparing"
    ranks = start(tmp_path / "run", slow(), load=datasets, env={"PREPARING": str(preparing), "PREPARE_S": "60"})
    ranks.until(preparing.exists)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.log()
    assert "stopped before there was anything to save" in ranks.log()


def test_preparing_may_take_longer_than_the_network_timeout(start: Start, tmp_path: Path, datasets: list[str]) -> None:
    """F073, F006: 3 s with a timeout of 1 s."""
    recipe = slow(network={"timeout": "1s"})
    ranks = start(tmp_path / "run", recipe, load=datasets, env={"PREPARING": os.devnull, "PREPARE_S": "3"})
    assert ranks.wait() == [0, 0], ranks.log()


def test_a_loss_that_is_not_finite_ends_all_ranks_at_its_step(
    start: Start, tmp_path: Path, datasets: list[str]
) -> None:
    ranks = start(tmp_path / "run", slow("poisoned", checkpoint={"every": "1 steps"}), load=datasets)
    assert ranks.wait() == [1, 1]
    errors = {ranks.log(rank).splitlines()[-1] for rank in (0, 1)}
    assert len(errors) == 1
    error = errors.pop()
    assert re.match(r"FloatingPointError: loss is nan on rank [01] alone at step ", error)
    step = int(error.split("step ")[1].split()[0])
    saved = complete(ranks.run_dir / "checkpoints")
    assert saved[-1:] == ([f"step-{step - 1}"] if step > 1 else [])


def test_ranks_of_two_runs_do_not_meet(start: Start, tmp_path: Path) -> None:
    """F034: every rank names the run that it belongs to, and the number of ranks is the planned one."""
    ranks = start(tmp_path / "run", tiny(), rank_env={1: {"LAUNCH_RUN_ID": "other"}})
    assert ranks.wait() == [1, 1]
    assert "rank 0 belongs to run run, attempt 1, rank 1 to run other, attempt 1" in ranks.log()
    few = start(tmp_path / "few", tiny(), planned=4)
    assert few.wait() == [1, 1]
    assert "the world size is 2, the plan says 4" in few.log()


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 4), (2, 2), (2, 1)])
def test_ranks_and_accumulation_do_not_change_the_training(
    start: Start, tmp_path: Path, ranks: int, accumulate: int
) -> None:
    """F089: batches of 8 as 1 x 8, 4 x 2, 2 ranks x 2 x 2; 44 samples, so an epoch ends with half a batch."""
    import torch

    def recipe(accumulate: int) -> dict[str, Any]:
        data = {"samples": 44, "eval_samples": 0, "global_batch_size": 8}
        train = {"until": "3 epochs", "optimizer": {"name": "sgd", "lr": 0.1}, "accumulate": accumulate}
        return tiny(model=LINEAR | {"dropout": 0.0, "hidden": 16}, data=data, train=train)

    plain = weights_of(start, tmp_path / "plain", recipe(1), 1)
    other = weights_of(start, tmp_path / "other", recipe(accumulate), ranks)
    assert plain.keys() == other.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(other[key], tensor, rtol=0, atol=1e-6)
    assert [r["samples_seen"] for r in read_metrics(tmp_path / "other" / "metrics.jsonl")][-1] == 3 * 44


def test_loader_processes_change_nothing_and_die_with_their_rank(start: Start, tmp_path: Path) -> None:
    """F011, F023."""
    recipe = tiny(train={"until": "12 epochs"})
    plain = start(tmp_path / "plain", recipe)
    assert plain.wait() == [0, 0], plain.log()
    recipe["data"]["loader_workers"] = 2
    sockets = tmp_path / "t"
    sockets.mkdir()
    loading = start(tmp_path / "loading", recipe, env={"TMPDIR": str(sockets)})
    assert loading.wait() == [0, 0], loading.log()
    assert not list(sockets.iterdir())
    assert loading.weights == plain.weights
    recipe["train"]["until"] = "9000 epochs"
    killed = start(tmp_path / "killed", recipe)
    killed.until_step(10)
    children = [child for pid in killed.pids for child in children_of(pid)]
    assert len(children) == 4
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_weights_to_start_from(start: Start, tmp_path: Path) -> None:
    source = start(tmp_path / "source", tiny(train={"until": "20 steps"}))
    assert source.wait() == [0, 0], source.log()
    recipe = tiny(train={"until": "1 steps", "optimizer": {"name": "sgd", "lr": 0.0}})
    recipe["checkpoint"]["init_from"] = str(source.run_dir)
    tuned = start(tmp_path / "tuned", recipe)
    assert tuned.wait() == [0, 0], tuned.log()
    assert tuned.weights == source.weights
    assert tuned.event("training_started")["step"] == 0


def test_bf16_and_a_schedule_in_epochs(start: Start, tmp_path: Path) -> None:
    schedule = {"name": "linear", "warmup": "1 epochs", "final": 0.5}
    ranks = start(tmp_path / "run", tiny(train={"until": "4 epochs", "precision": "bf16", "schedule": schedule}))
    assert ranks.wait() == [0, 0], ranks.log()
    rates = [record["train/lr"] for record in read_metrics(ranks.metrics)]
    assert rates[5] == pytest.approx(0.01)
    assert rates[0] == pytest.approx(0.01 / 6)
    assert 0.005 < rates[-1] < 0.0054


def test_a_tracker_that_hangs_delays_nothing(start: Start, tmp_path: Path) -> None:
    """F063, F005: init sleeps for longer than the network timeout; one rank of two asks for it."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(
        "import os, time\nopen(os.environ['FAKE_WANDB'], 'a').write('imported\\n')\ntime.sleep(600)\n"
    )
    recipe = tiny(network={"timeout": "2s"}, train={"until": "60 steps"}, tracking={"wandb": {"mode": "auto"}})
    env = {"FAKE_WANDB": str(tmp_path / "calls"), "WANDB_MODE": "offline"}
    (tmp_path / "hurry.py").write_text("import jobs.tracking\njobs.tracking.FINISH_S = 3.0\n")
    load, path = [str(tmp_path / "hurry.py")], [str(tmp_path / "fake")]
    ranks = start(tmp_path / "run", recipe, env=env, load=load, path=path)
    assert ranks.wait() == [0, 0], ranks.log()
    assert (tmp_path / "calls").read_text() == "imported\n"
    assert "tracking did not finish within" in ranks.log()
    assert ranks.log().splitlines()[-1].startswith("weights_sha256 ")


def test_a_stop_waits_for_a_tracker_for_a_part_of_its_grace_time(start: Start, tmp_path: Path) -> None:
    """Where a site gives a job 5 s after TERM, ranks that have saved must not be killed while W&B is being imported."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text("import time\ntime.sleep(600)\n")
    recipe = tiny(train={"until": "100k steps"}, tracking={"wandb": {"mode": "offline"}})
    ranks = start(tmp_path / "run", recipe, path=[str(tmp_path / "fake")], grace_s=3.0)
    ranks.until_step(5)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.log()
    assert "tracking did not finish within 1.0 s" in ranks.log()


def test_by_hand_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(tiny()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "jobs.train"]
    done = subprocess.run(
        [*command, "tiny.yaml", "train.until=10 steps", "train.eval_every=null"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [summary] = [event for event in read_events(tmp_path / "runs" / "tiny-torchrun") if event["event"] == "summary"]
    assert summary["step"] == 10
    assert done.stdout.splitlines()[-1] == f"weights_sha256 {summary['weights_sha256']}"


def test_gradients_in_one_row_or_in_buckets_make_the_same_weights(start: Start, tmp_path: Path) -> None:
    """Two ranks: then both ways add the same two numbers, and a factor of two costs no bit."""
    found = []
    for name, parallelism in (("row", {}), ("buckets", {"strategy": "ddp", "bucket_cap_mb": 24})):
        recipe = tiny(train={"until": "40 steps", "eval_every": None}, parallelism=parallelism)
        group = start(tmp_path / name, recipe)
        assert group.wait() == [0, 0], group.log()
        found.append(
            (group.weights, [line["train/loss"] for line in read_metrics(group.metrics) if "train/loss" in line])
        )
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
