"""HF's Trainer: every `train` stops and saves on SIGTERM, and goes on from the newest whole checkpoint of this run.

Trainer saves and loads; from here come the moment and the choice. Its own `enable_jit_checkpoint` is no help with more
than one rank: each one saves some time after its own signal, at whatever step it has reached by then.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

from .ledger import Choice, Ledger, announce, sync
from .ranks import STOPPED_EXIT_CODE, Stop, from_rank_zero, is_rank_zero, say, tell_step

_STATE = "trainer_state.json"


def change_trainer(module: ModuleType) -> None:
    """Add what is missing to the Trainer of `transformers.trainer`."""
    trainer_class, ledger = module.Trainer, Ledger()
    guard_class = _guard_class(module.TrainerCallback)
    train = trainer_class.train
    train_signature, trainings = inspect.signature(train), itertools.count(1)

    @functools.wraps(train)
    def train_and_resume(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        call = train_signature.bind(trainer, *args, **kwargs)
        if call.arguments.get("trial") is not None:
            return train(*call.args, **call.kwargs)  # one of many small trainings of a search
        _check_size(trainer.args.world_size)
        guard = guard_class(ledger, next(trainings))
        trainer.remove_callback(guard_class)
        trainer.add_callback(guard)
        chosen = guard.resume(trainer.args, call.arguments.get("resume_from_checkpoint"))
        if chosen is not None:
            call.arguments["resume_from_checkpoint"] = chosen
        handler = guard.stop.listen()
        result = train(*call.args, **call.kwargs)
        guard.stop.restore(handler)
        return result

    trainer_class.train = train_and_resume


def _check_size(world_size: int) -> None:
    """Without it, each process would train alone, and all of them would write into one folder."""
    asked = int(os.environ["WORLD_SIZE"])
    if world_size != asked:
        raise SystemExit(
            f"launch: this Trainer trains with {world_size} process, not with the {asked} of the run; "
            "on CPUs it wants `use_cpu=True` in its TrainingArguments, or ACCELERATE_USE_CPU=true"
        )


def _guard_class(callback_class: type[Any]) -> type[Any]:
    """A callback of the transformers that the script has imported."""

    class LaunchGuard(callback_class):  # type: ignore[misc]
        """Stops a training between two steps, and notes which checkpoints are complete."""

        def __init__(self, ledger: Ledger, training: int) -> None:
            self.stop = Stop()
            self._ledger, self._training = ledger, training
            self._stopping = False

        def resume(self, args: Any, asked: Any) -> str | None:
            """Return the checkpoint of this run to go on from, if there is one."""
            chosen: str | None = from_rank_zero(lambda: _choose(self._ledger, self._training, args, asked))
            return chosen

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell_step(state.global_step)
            if self.stop.agreed():
                self._stopping = True
                # Without the optimizer nothing can go on; and an evaluation may take longer than there is time for.
                args.save_only_model, control.should_evaluate, control.should_save = False, False, True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            self.stop.wait_for_all()  # every rank writes the state of its random numbers
            if is_rank_zero() and not args.save_only_model:
                if self._stopping:
                    sync(folder)
                self._ledger.add(folder, step=state.global_step, training=self._training, identity=(_STATE,))
            if self._stopping:
                self.stop.wait_for_all()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that is still on its way to this rank
                say(f"stopped: saved step {state.global_step} in {folder}")
                raise SystemExit(STOPPED_EXIT_CODE)

    return LaunchGuard


def _choose(ledger: Ledger, training: int, args: Any, asked: Any) -> str | None:
    choice = ledger.newest(training=training)
    for unfinished in _unfinished(ledger, Path(args.output_dir), choice):
        say(f"skipped: {unfinished}")
    announce(choice, f"resume_from_checkpoint={str(asked)!r}" if asked else None)
    if args.save_only_model or str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
        say("this Trainer saves nothing to go on from while it trains: after a kill it begins at its last stop")
    return choice.path


def _unfinished(ledger: Ledger, output_dir: Path, choice: Choice) -> list[str]:
    """Folders that look newer than the choice, and that this run has not finished."""
    steps = {path: path.name.rpartition("-")[2] for path in output_dir.glob("checkpoint-*") if path.is_dir()}
    newer = {path: int(step) for path, step in steps.items() if step.isdecimal() and int(step) > choice.step}
    return [
        f"{path} was not finished, or not by this run"
        for path in sorted(newer, key=lambda path: newer[path])
        if not ledger.knows(path)
    ]
