"""Lightning: every `trainer.fit` stops and saves on SIGTERM, and goes on from the newest checkpoint of this run.

Lightning saves and loads; from here come the moment, the place and the choice. Its own answer to SIGTERM is replaced:
it runs a broadcast inside the signal handler, and leaves without a checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .ledger import Ledger, Saved, announce, sync
from .ranks import STOPPED_EXIT_CODE, Stop, from_rank_zero, is_rank_zero, say, tell_step

_STAMP = "launch"
"""Key in every checkpoint: the run that wrote it, and in which of its trainings."""
_FILE = "lightning.ckpt"
_KEPT_STOPS = 2
_EXACT_SINCE = (2, 5)


def change_trainer(module: ModuleType) -> None:
    """Add what is missing to the Trainer of `lightning.pytorch.trainer.trainer`, or of the same under its old name."""
    # Lightning's own way to give a default from outside: the folder is then the same in every attempt.
    os.environ.setdefault("PL_TRAINER_DEFAULT_ROOT_DIR", f"{os.environ['LAUNCH_RUN_DIR']}/lightning")
    trainer_class, ledger = module.Trainer, Ledger()
    guard_class = _guard_class(module.Callback)
    fit, save_checkpoint = trainer_class.fit, trainer_class.save_checkpoint
    fit_signature, trainings = inspect.signature(fit), itertools.count(1)

    @functools.wraps(fit)
    def fit_and_resume(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks):
            return fit(trainer, *args, **kwargs)  # a Tuner, which only tries learning rates or batch sizes
        _check_version(module)
        call = fit_signature.bind(trainer, *args, **kwargs)
        guard = guard_class(ledger, save_checkpoint, next(trainings))
        trainer.callbacks = [other for other in trainer.callbacks if not isinstance(other, guard_class)] + [guard]
        # In place of a handler that runs a broadcast, which may meet a collective that it interrupts.
        trainer._signal_connector._sigterm_notifier_fn = guard.stop.request
        call.arguments.update(guard.resume(call.arguments.get("ckpt_path"), fit_signature))
        return fit(*call.args, **call.kwargs)

    @functools.wraps(save_checkpoint)
    def save_and_note(trainer: Any, filepath: Any, weights_only: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        result = save_checkpoint(trainer, filepath, weights_only, *args, **kwargs)
        guards = [callback for callback in trainer.callbacks if isinstance(callback, guard_class)]
        if guards and not weights_only and is_rank_zero():
            ledger.add(Path(filepath), step=trainer.global_step, training=guards[0].training)
        return result

    trainer_class.fit, trainer_class.save_checkpoint = fit_and_resume, save_and_note


def _check_version(module: ModuleType) -> None:
    package = sys.modules[module.__name__.removesuffix(".trainer.trainer")]
    major, minor = (int(number) for number in package.__version__.split(".")[:2])
    if (major, minor) < _EXACT_SINCE:
        say(f"Lightning {package.__version__} counts steps wrong when it goes on from within an epoch; 2.5 does not")


def _guard_class(callback_class: type[Any]) -> type[Any]:
    """A callback of the Lightning that the script has imported."""

    class LaunchGuard(callback_class):  # type: ignore[misc]
        """Stops a training between two steps, and finds the data of one that goes on."""

        def __init__(self, ledger: Ledger, save_checkpoint: Callable[..., None], training: int) -> None:
            self.stop, self.training = Stop(), training
            self._ledger, self._save_checkpoint = ledger, save_checkpoint
            self._step = 0

        def resume(self, asked: Any, signature: inspect.Signature) -> dict[str, Any]:
            """Return the arguments of `fit` that go on from a checkpoint of this run, if there is one."""
            choice = from_rank_zero(lambda: _choose(self._ledger, self.training, asked))
            if choice is None:
                return {}
            # What this run has written itself it may also read: hyperparameters can be objects of any class.
            trusted = {"weights_only": False} if "weights_only" in signature.parameters else {}
            return {"ckpt_path": choice, **trusted}

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint[_STAMP] = {"run_id": os.environ["LAUNCH_RUN_ID"], "training": self.training}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._step = trainer.global_step
            if trainer.ckpt_path is not None:
                _find_place_in_data(trainer)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == self._step:
                return  # between two steps gradients are being accumulated, and no checkpoint holds those
            self._step = trainer.global_step
            tell_step(self._step)
            if self.stop.agreed():
                # A rank may learn of the stop from another one before its own signal comes: that must find no default.
                trainer._signal_connector._original_handlers[signal.SIGTERM] = signal.SIG_IGN
                self._save(trainer)
                raise SystemExit(STOPPED_EXIT_CODE)

        def _save(self, trainer: Any) -> None:
            folder = self._ledger.folder / f"step-{self._step}"
            part = folder.with_name(f".{folder.name}.tmp")
            if is_rank_zero():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            self.stop.wait_for_all()
            self._save_checkpoint(trainer, part / _FILE, False)
            trainer.strategy.checkpoint_io.teardown()  # an asynchronous one has only begun
            self.stop.wait_for_all()
            if is_rank_zero():
                shutil.rmtree(folder, ignore_errors=True)  # of the same step: it was broken, else we had begun there
                sync(part)
                part.rename(folder)
                sync(folder.parent)
                self._ledger.add(folder / _FILE, step=self._step, training=self.training)
                _prune(self._ledger.folder)
            self.stop.wait_for_all()
            say(f"stopped: saved step {self._step} in {folder / _FILE}")

    return LaunchGuard


def _choose(ledger: Ledger, training: int, asked: Any) -> str | None:
    choice = ledger.newest(training=training, damage=_damage)
    announce(choice, f"ckpt_path={str(asked)!r}" if asked else None)
    return choice.path


def _damage(path: Path, saved: Saved) -> str | None:
    """What Lightning would stumble over, or load without being the right one."""
    import torch

    header = path / "meta.pt" if path.is_dir() else path  # a sharded checkpoint has its shards beside that
    if not header.is_file():
        return None  # of another strategy, which alone can read it
    try:
        checkpoint = torch.load(header, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:  # noqa: BLE001 - a broken pickle raises anything; the reason is shown, an older one is used
        return f"{header.name} cannot be read ({type(error).__name__}: {error})"
    if checkpoint.get(_STAMP) != {"run_id": os.environ["LAUNCH_RUN_ID"], "training": saved.training}:
        return "it is not the one that this run wrote"
    return None


def _find_place_in_data(trainer: Any) -> None:
    """Pass over the batches of the current epoch that were trained before the checkpoint.

    Lightning counts them, but begins the epoch's data anew, unless the loader has a state of its own.
    """
    loop = trainer.fit_loop
    loaders, fetcher = loop._combined_loader, loop._data_fetcher
    if fetcher is None or all(hasattr(loader, "load_state_dict") for loader in loaders.flattened):
        return
    trained = loop.epoch_loop.batch_progress.current.ready
    if trained >= trainer.num_training_batches:
        trained = 0  # the checkpoint was made at the end of an epoch
    for loader in loaders.flattened:
        for name in ("sampler", "batch_sampler"):
            sampler: Any = getattr(loader, name, None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(loop.epoch_progress.current.processed)
    iter(fetcher)  # it was made before the epoch was known
    for _ in range(trained):
        next(fetcher.iterator)
    if trained:
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        say(f"passes over {trained} batches of epoch {trainer.current_epoch}, which are trained already")


def _prune(folder: Path) -> None:
    """Stops leave a checkpoint each: the newest are enough."""
    stops = [path.parent for path in folder.glob(f"step-*/{_FILE}")]
    for old in sorted(stops, key=lambda path: int(path.name.removeprefix("step-")))[:-_KEPT_STOPS]:
        shutil.rmtree(old)
