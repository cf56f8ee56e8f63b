"""Each shipped recipe that trains a model is trained, a little: what it says goes together.

Sizes are cut down, the rest is as it is shipped.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launched import LAUNCH, LIMIT_S

from launcher.recipe.loader import load_recipe

pytestmark = pytest.mark.process

RECIPES = Path(__file__).parents[2] / "recipes"
BRIEF = ("train.until=2 steps", "tracking.wandb.mode=disabled", "tracking.watch=null", "checkpoint.every=null")
TOKENS = (
    f"data.path={RECIPES.parent / 'launcher/recipe'}",
    "data.context=16",
    "model={name: gpt, layers: 2, heads: 2, width: 16, context: 16}",
)
IMAGES = (
    "data={name: synthetic, shape: 3x32x32, samples: 64, eval_samples: 16, global_batch_size: 32, loader_workers: 2}",
    "model.channels=4",
)
TRAINED = {
    "mnist_single": ("data.global_batch_size=16",),
    "mnist_data_parallel": ("data.global_batch_size=16",),
    "cifar_resnet_ddp": IMAGES,
    "lstm_split": ("model.width=8",),
    "gpt_ddp": (*TOKENS, "resources.nproc_per_node=2"),
    "gpt_fsdp": (*TOKENS, "resources.nproc_per_node=2"),
    "gpt_3d": TOKENS,
    "synthetic_bf16": ("model.hidden=16", "resources.nproc_per_node=2"),
    "mnist_sweep": ("model.hidden=16", "sweep=null"),
}
"""Recipe -> what is smaller than in it."""
IN_DOCUMENTS = {"mnist_ddp", "mnist_mlp"}
"""Those that commands of README.md train, which tests/unit/test_docs.py runs."""


def test_every_recipe_of_a_model_is_trained_somewhere() -> None:
    of_models = {path.stem for path in RECIPES.glob("*.yaml") if not load_recipe(path).recipe.is_script}
    assert of_models == {*TRAINED, *IN_DOCUMENTS}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", TRAINED)
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    argv = [LAUNCH, str(RECIPES / f"{name}.yaml"), *BRIEF, *TRAINED[name], "--runs-dir", str(tmp_path), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]) / "result.json").read_text())
    assert (result["state"], result["step"]) == ("SUCCEEDED", 2)
    assert result["metrics"]["eval/loss"] > 0
