"""The loop: steps, evaluations and checkpoints, in the same order on every rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from jobs.agreement import Agreement
from jobs.checkpoint import Saved
from jobs.evaluation import evaluate
from jobs.finite import KeptBuffers, bad_weights
from jobs.folders import Progress
from jobs.gradients import Gradients
from jobs.hygiene import Garbage
from jobs.keeper import is_peer_lost
from jobs.layers import compiled_record, graphs_compiled
from jobs.memory_use import MemoryUse, measure_use
from jobs.norms import norms_one_sample
from jobs.pace import pace_text
from jobs.parts import Parts
from jobs.precision import LEAST_SCALE
from jobs.report import Rate, progress_line
from jobs.sampler import Share
from jobs.saving import Counts, Saving, Voice
from jobs.starving import Means, Starving
from launcher.runs.clock import Phase

_ADVICE = "try a lower train.optimizer.lr or a longer train.schedule.warmup"


def _not_finite(text: str, step: int) -> FloatingPointError:
    """The end of a training whose numbers are not finite in a step, which is not complete."""
    error = FloatingPointError(text)
    error.launch_step = step  # type: ignore[attr-defined]
    error.launch_plain = True  # type: ignore[attr-defined]
    return error


@dataclass(kw_only=True)
class Times:
    """Where the time of an attempt went, in seconds."""

    eval_s: float = 0.0
    save_s: float = 0.0
    train_s: float = 0.0


class Trainer:
    """One attempt at a training, from where it stands to its end or to a stop."""

    def __init__(self, parts: Parts, progress: Progress, *, saved: bool, owes_save: bool = False) -> None:
        self.progress = progress
        self.times = Times()
        self.samples_trained = 0
        self._parts = parts
        self._calendar = parts.calendar
        self._saving = Saving(
            parts.checkpoints,
            parts.group,
            Voice(complete=self._say_saved, failed=self._say_not_saved, say=parts.report.say),
            asynchronous=parts.asynchronous,
            max_failed=parts.max_failed_saves,
        )
        self._agreement = Agreement(
            parts.stop,
            parts.report.forgettable,
            has_trouble=lambda: self._saving.has_trouble,
            carrier=parts.shared.carrier,
        )
        self._saved = saved
        """Whether the state of this moment is on disk."""
        self._owes_save = owes_save
        """Whether the last save that was due is not on disk, since the attempt that began it has died."""
        leaves_out = parts.on_nan == "skip" or parts.precision.may_overflow
        self._buffers = KeptBuffers(parts.net) if leaves_out else None
        self._gradients = Gradients(parts, self._agreement)
        self._starving = Starving(
            self._gradients.feed, Means.here(parts.loader.loader_workers, parts.world, parts.device)
        )
        self._begun_s = 0.0
        self._memory = MemoryUse(parts.device)
        self._graphs = 0
        """What torch.compile had made before the first step of this attempt."""
        self._base_lrs = [group["lr"] for group in parts.optimizer.param_groups]
        self._lr = 0.0
        self._rate = Rate()

    @property
    def saves(self) -> Counts:
        """What became of the saves."""
        return self._saving.counts

    def snapshots_told(self) -> dict[str, float] | None:
        """How many snapshots this rank wrote to memory, and how long the training waited for them; None without any."""
        snapshots = self._parts.snapshots
        return None if snapshots is None else {"count": snapshots.count, "blocked_s": round(snapshots.blocked_s, 3)}

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        evaluated = self.progress.metrics is not None or self._parts.evaluation is None
        return self.progress.step >= self._calendar.total_steps and evaluated

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, and the end is on disk."""
        return self.finished and self._saved

    def meet(self) -> bool:
        """Wait for all ranks. Returns whether one of them was told to stop."""
        return self._agreement.now().stop

    def run(self, *, stop: bool = False) -> bool:
        """Train to the end. Returns False where all ranks left early together, on request, with a checkpoint.

        Raises FloatingPointError, on all ranks at the same step, where the loss or the weights are not finite.
        """
        self._begun_s = time.perf_counter()
        try:
            with Garbage() as self._garbage:
                self._train(stop=stop)
        except Exception as error:
            # The step it was in: who reads the error file wants to know whether the next attempt fails there again.
            error.launch_step = getattr(error, "launch_step", self.progress.step)  # type: ignore[attr-defined]
            if not is_peer_lost(error):
                self._saving.let_end()
            raise
        self.times.train_s = self._trained_s()
        return self.finished

    def starving(self) -> dict[str, Any]:
        """How long the steps of this rank waited for their samples in all, and what to do about it."""
        return self._starving.to_record(self.times.train_s)

    def memory_told(self) -> dict[str, int]:
        """The memory of this rank, in bytes."""
        return measure_use(self._parts.device).to_record()

    def compiled_told(self) -> dict[str, float] | None:
        """What torch.compile has made; None where it made nothing."""
        return compiled_record(self._graphs)

    def _trained_s(self) -> float:
        return time.perf_counter() - self._begun_s - self.times.eval_s - self.times.save_s

    def _train(self, *, stop: bool) -> None:
        if not self.finished:
            self._gradients.rehearse(self.progress.step)
            if self._parts.compiles or norms_one_sample(self._parts):
                self._gradients.rehearse_shapes(self.progress.step)
        self._begun_s = time.perf_counter()  # what was compiled in the rehearsal is no speed of the training
        self._graphs = graphs_compiled()
        self._rate.lap()
        profiler, steps = self._parts.profiler, 0
        if profiler is not None:
            profiler.step(0, at=self.progress.step)
        while not stop and self._boundary() and self.progress.step < self._calendar.total_steps:
            stop = self._step()
            if profiler is not None:
                profiler.step(steps := steps + 1, at=self.progress.step)
            self._parts.marks.step(self.progress.step)
        if profiler is not None:
            profiler.finish(at=self.progress.step)
        if not self.finished or stop:
            self._check_weights()
            self._save(last=True)
        self._await_save()
        if self._parts.snapshots is not None:
            self._parts.snapshots.finish()
        while not self._saved:  # what all was done for: where others may fail, this one is tried again
            self._save(last=True)

    def _boundary(self) -> bool:
        """Between two steps: what is due. Returns False where a stop was agreed on."""
        step, calendar = self.progress.step, self._calendar
        wants_eval = self._parts.evaluation is not None and calendar.is_due(calendar.eval_every, step)
        wants_save = calendar.is_due(calendar.save_every, step) or self._owes_save
        self._owes_save = False
        if self._agreement.trouble:
            self._settle_save()
        if wants_save:
            self._check_weights()
        if wants_eval and self.progress.metrics is None and not self._evaluate():
            return False
        if wants_save:
            self._save(last=step == calendar.total_steps)
        elif calendar.snapshot_every and step and step % calendar.snapshot_every == 0 and not self._saved:
            self._snapshot()
        self._garbage.collect(step, pauses=wants_eval or wants_save)
        return True

    def _step(self) -> bool:
        """One update of the weights, or none where its numbers are not finite.

        Returns whether a stop was agreed on, by all ranks after the same step.

        All ranks hear the loss of this step before any of them changes its weights: a step that is complete on one rank
        is known there with all that is recorded of it, whoever dies then.
        """
        share = self._parts.sampler.share(self.progress.samples_seen)
        if self._buffers is not None:
            self._buffers.keep()
        self._set_lr()
        agreed = self._gradients.make(share, self.progress.step)
        problem, in_gradients = self._gradients.problem(agreed)
        loss = agreed.sums[0] / agreed.sums[1]
        if problem and in_gradients and self._parts.precision.may_overflow:
            self._overflow(problem, share, loss)
            return agreed.stop
        if problem:
            self._parts.precision.discard()
            self._leave_out(problem, share)
            return agreed.stop
        self._gradients.clip()
        self._parts.marks.work()
        self._await_copy()
        step, seen = self.progress.step + 1, self.progress.samples_seen + share.global_count
        self._rate.add(share.global_count)
        self.samples_trained += share.global_count
        with self._changing():
            self._parts.precision.step(self._parts.optimizer)
            self._parts.precision.update(self._parts.optimizer, overflow=False)
            self.progress = dataclasses.replace(self.progress, step=step, samples_seen=seen, metrics=None)
            self._saved = False
            norm = round(self._gradients.norm, 6)
            self._record(loss, {"samples_seen": seen, "train/lr": self._lr, "train/grad_norm": norm})
        self._gradients.clear()
        return agreed.stop

    def _changing(self) -> AbstractContextManager[None]:
        """Around what changes the state: it is whole before and after it, and can be kept."""
        return nullcontext() if self._parts.keeper is None else self._parts.keeper.changing()

    def _overflow(self, problem: str, share: Share, loss: float) -> None:
        """Leave out a step whose gradients overflow in fp16, and halve the scale; the same on every rank.

        Its batch is consumed, and nothing but the scale changes: the schedule does not get on either.
        """
        parts, before = self._parts, self.progress
        scale = parts.precision.scale
        step, seen = before.step + 1, before.samples_seen + share.global_count
        assert scale is not None
        assert self._buffers is not None
        with self._changing():
            self._buffers.restore()
            parts.precision.update(parts.optimizer, overflow=True)
            self.progress = dataclasses.replace(
                before, step=step, samples_seen=seen, metrics=None, overflows=before.overflows + 1
            )
            self._saved = False
            values = {"skipped": 1, "train/loss": loss, "samples_seen": seen, "train/lr": self._lr}
            parts.report.metrics(step, {**values, "train/scale": scale})
        self._gradients.clear()
        self._rate.add(share.global_count)
        place = f"overflow at step {step}: {problem}, at scale {scale:,g}"
        if scale / 2 < LEAST_SCALE:
            raise _not_finite(f"{place}, which cannot be made smaller; try train.precision: bf16, or {_ADVICE}", step)
        parts.report.event("step_skipped", step=step, reason=f"overflow: {problem}", scale=scale)
        parts.report.say(f"{place}: the step is skipped, the scale is halved")

    def _leave_out(self, problem: str, share: Share) -> None:
        """Do what the recipe says of a step whose loss or gradients are not finite; the same on every rank."""
        parts, before = self._parts, self.progress
        self._gradients.clear()
        step, seen = before.step + 1, before.samples_seen + share.global_count
        place = f"{problem} at step {step} (samples_seen {seen})"
        if parts.on_nan == "stop":
            raise _not_finite(f"{place}; {_ADVICE}", step)
        if parts.on_nan == "rollback":
            self._roll_back(place, problem, step, seen)
            return
        left_out = before.left_out.with_steps(step, step)
        if left_out.in_a_row(step) > parts.max_skips:
            skipped = f"after {parts.max_skips} that were skipped in a row (faults.max_skips)"
            raise _not_finite(f"{place}, {skipped}; {_ADVICE}", step)
        assert self._buffers is not None
        with self._changing():
            self._buffers.restore()
            self.progress = dataclasses.replace(before, step=step, samples_seen=seen, metrics=None, left_out=left_out)
            self._saved = False
            parts.report.metrics(step, {"skipped": 1, "samples_seen": seen, "train/lr": self._lr})
        parts.report.event("step_skipped", step=step, reason=problem)
        parts.report.say(f"{place}: its batch is skipped ({left_out.in_a_row(step)} in a row)")

    def _roll_back(self, place: str, problem: str, step: int, seen: int) -> None:
        """Go back to the newest checkpoint, and on with the batch after this one."""
        parts, before = self._parts, self.progress
        rollbacks = before.left_out.rollbacks + 1
        if rollbacks > parts.max_skips:
            rolled_back = f"after {parts.max_skips} rollbacks without a new checkpoint (faults.max_skips)"
            raise _not_finite(f"{place}, {rolled_back}; {_ADVICE}", step)
        parts.report.flush()
        self._await_save()
        if parts.snapshots is not None:
            parts.snapshots.finish()
        with self._changing(), parts.marks.during(Phase.SAVE, before.step):
            choice, kept = parts.go_back(f"rollback-{step}")
            if choice.name is None:
                none = "there is no checkpoint to roll back to yet (checkpoint.every)"
                raise _not_finite(f"{place}; {none}; {_ADVICE}", step)
            left_out = dataclasses.replace(kept.left_out.with_steps(kept.step + 1, step), rollbacks=rollbacks)
            self.progress = Progress(step=step, samples_seen=seen, left_out=left_out, overflows=kept.overflows)
            self._saved = False
            for each in range(kept.step + 1, step + 1):
                parts.report.metrics(each, {"skipped": 1})
        parts.report.event("rolled_back", step=step, to_step=kept.step, reason=problem)
        parts.report.say(
            f"{place}: rolled back to {choice.name}; the batches of steps {kept.step + 1} to {step} are left out"
        )
        self._rate.lap()

    def _set_lr(self) -> None:
        factor = self._parts.factor(self.progress.step - self.progress.overflows)
        for group, base in zip(self._parts.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor
        self._lr = self._base_lrs[0] * factor

    def _record(self, loss: float, values: dict[str, float]) -> None:
        """Note a step, which all ranks know."""
        step = self.progress.step
        calendar, rate = self._calendar, self._rate.now()
        left_s = (calendar.total_steps - step) * self._parts.sampler.global_batch_size / max(rate, 1e-9)
        pace = self._parts.pace(rate)
        speed = {"samples_per_s": round(rate, 1), **pace, "eta_s": round(left_s, 1)}
        is_told = step % calendar.log_every == 0 or step == calendar.total_steps
        if is_told:
            speed["train/data_wait_s"] = round(self._gradients.feed.lap(), 6)
            values |= self._usage(step)
        self._parts.report.metrics(step, {"train/loss": loss, **values, **speed})
        if is_told:
            line = progress_line(
                step=step,
                total_steps=calendar.total_steps,
                steps_per_epoch=calendar.steps_per_epoch,
                loss=loss,
                lr=values["train/lr"],
                samples_per_s=rate,
                left_s=left_s,
                pace=pace_text(pace),
            )
            self._parts.report.say(line)
            if text := self._starving.news(self._trained_s()):
                self._parts.report.say(text)
            self._rate.lap()

    def _usage(self, step: int) -> dict[str, float]:
        """The memory of this rank, and the scale of fp16."""
        scale = self._parts.precision.scale
        use = self._memory.look(step)
        if growth := self._memory.growth:
            self._parts.report.event(
                "memory_grows",
                from_step=growth.from_step,
                to_step=growth.to_step,
                from_bytes=growth.from_bytes,
                to_bytes=growth.to_bytes,
            )
            self._parts.report.say(growth.sentence())
        memory = {f"memory/{name}": value for name, value in use.to_record().items()}
        return memory | ({} if scale is None else {"train/scale": scale})

    def _evaluate(self) -> bool:
        """Evaluate, on all ranks. Returns False where a stop was agreed on meanwhile."""
        parts = self._parts
        assert parts.evaluation is not None
        parts.report.flush()
        with self._timed("eval_s") as timer:
            metrics = evaluate(
                parts.shared,
                parts.task,
                parts.evaluation,
                grid=parts.grid,
                device=parts.device,
                agreement=self._agreement,
                precision=parts.precision.around_forward(),
                on_batch=lambda: parts.marks.at(Phase.EVAL, self.progress.step),
            )
        if metrics is None:
            return False
        was_saved = self._saved
        with self._changing():
            self.progress = dataclasses.replace(self.progress, metrics=metrics)
            parts.report.metrics(self.progress.step, metrics)
        parts.report.event("evaluated", step=self.progress.step, time_s=round(timer(), 4))
        parts.report.say(f"eval at step {self.progress.step}: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
        if was_saved:
            self._await_save()
            if self._saved:
                parts.checkpoints.add_metrics(self.progress)
        return True

    def _save(self, *, last: bool = False) -> None:
        """Begin to write a checkpoint, unless this very state is on disk or on its way there.

        last: nothing follows that would have to wait; when it returns the checkpoint is complete, or has failed.
        """
        parts = self._parts
        if self._saved:
            return
        left_out = self.progress.left_out
        if left_out.rollbacks and not left_out.in_a_row(self.progress.step):
            self.progress = dataclasses.replace(self.progress, left_out=dataclasses.replace(left_out, rollbacks=0))
        parts.report.flush()
        with self._timed("save_s"):
            # whoever does not come is missed after `network.timeout`; the save itself may take longer
            self._saved = self._saving.begin(parts.state, self.progress, self._agreement, last=last)
        if last or not parts.asynchronous:
            self._await_save()

    def _await_save(self) -> None:
        """Wait, all ranks together, until no save is running. Raises SaveError."""
        with self._timed("save_s"):
            failed = self._saving.finish(self._agreement)
        self._saved &= failed != self.progress.step

    def _settle_save(self) -> None:
        """Some rank has trouble with a save. Raises SaveError where the recipe does not allow that."""
        with self._timed("save_s"):
            failed = self._saving.settle(self._agreement)
        self._saved &= failed != self.progress.step

    def _await_copy(self) -> None:
        """Before the weights change: wait until the state that is being saved is copied."""
        for each in (self._saving, self._parts.snapshots):
            if each is not None and each.holds_update:
                with self._timed("save_s"):
                    each.wait_for_copy()

    def _snapshot(self) -> None:
        """Begin to write the state to the memory of this node; on one rank of each."""
        self._parts.report.flush()
        if self._parts.snapshots is not None:
            with self._timed("save_s"):
                self._parts.snapshots.begin(self._parts.state, self.progress, self._parts.report.unwritten())

    def _say_saved(self, saved: Saved, step: int, time_s: float, blocked_s: float) -> None:
        """On rank 0, in the thread of the save: it is complete."""
        self._parts.report.event(
            "checkpoint_saved",
            step=step,
            path=f"checkpoints/{saved.name}",
            time_s=round(time_s, 4),
            blocked_s=round(blocked_s, 4),
            size_bytes=saved.size_bytes,
            best=saved.best,
        )
        self._parts.on_saved(step)

    def _say_not_saved(self, step: int, reason: str, in_a_row: int) -> None:
        self._parts.report.event("save_failed", step=step, reason=reason, in_a_row=in_a_row)
        self._parts.report.say(f"THE SAVE OF STEP {step} HAS FAILED, {in_a_row} in a row: {reason}")

    def _check_weights(self) -> None:
        """Before a save: a checkpoint that cannot be trained from is worse than none, it would be resumed for ever."""
        if self._saved:
            return
        step, seen = self.progress.step, self.progress.samples_seen
        problem = bad_weights(self._parts.net, None if self._parts.grid.is_replicated else self._gradients.any_rank)
        if problem:
            if self._parts.on_nan != "rollback":
                raise FloatingPointError(f"{problem} at step {step}")
            self._roll_back(f"{problem} at step {step} (samples_seen {seen})", problem, step, seen)

    @contextmanager
    def _timed(self, field: str) -> Iterator[Callable[[], float]]:
        begin = time.perf_counter()
        with self._parts.marks.during(Phase.EVAL if field == "eval_s" else Phase.SAVE, self.progress.step):
            yield lambda: time.perf_counter() - begin
        time_s = time.perf_counter() - begin
        setattr(self.times, field, getattr(self.times, field) + time_s)
        self._rate.pause(time_s)
