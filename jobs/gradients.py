"""The gradients of a step: forward, backward, and what all ranks must know before the weights change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from jobs.agreement import Agreed, Agreement
from jobs.buffers import SharedBuffers
from jobs.clip import GradientCheck
from jobs.data.base import Batch
from jobs.feed import Feed, beside
from jobs.finite import loss_message, loss_problem
from jobs.norms import one_value_is_a_matter_of_the_batch
from jobs.parallel.base import Pass
from jobs.parts import Parts
from jobs.profiling import watched
from jobs.sampler import Share, derive_seed


class Gradients:
    """Makes them, step by step."""

    def __init__(self, parts: Parts, agreement: Agreement) -> None:
        self._parts, self._agreement = parts, agreement
        grid = parts.grid
        self._buffers = SharedBuffers(parts.net, ranks=grid.degrees.data, group=grid.data_group, source=grid.data_first)
        self._check = GradientCheck(parts.net, parts.grid, self._add, row=parts.shared.gradients)
        self._scale, self._scale_tensor = math.nan, torch.zeros(())
        self._parameters = list(parts.net.parameters())
        self._late: tuple[Callable[[], float], int] | None = None
        """How the loss is read that is on its way from the GPU, and of how many samples it is."""
        self.norm = math.nan
        """L2 norm of the gradients of the last step, all together, before they were clipped."""
        self.feed = Feed(parts.loader, self._here, parts.marks, beside(parts.device))

    def rehearse(self, step: int) -> None:
        """One forward and backward whose result is thrown away.

        DDP orders its gradients anew after the first backward of a process. With three or more ranks the order of
        their sums, and so the last bit, depends on it: a resumed run would differ from one that was not interrupted.
        """
        self._rehearse(step, [self.feed.peek()], counted=1)

    def rehearse_shapes(self, step: int) -> None:
        """The same with a whole batch and with the last one of an epoch, the shapes that a training has.

        What torch.compile makes of them is made now: in the middle of a training it would look like a hang. And what
        a batch norm cannot do with a last sample is found now, not at the end of an epoch.
        """
        sampler = self._parts.sampler
        for seen in (0, (sampler.steps_per_epoch - 1) * sampler.global_batch_size):
            share = sampler.share(seen)
            self._rehearse(step, list(map(self._here, self._parts.loader.read(share))), counted=share.counted)

    def _rehearse(self, step: int, batches: list[Batch], *, counted: int) -> None:
        parts = self._parts
        buffers = {name: buffer.clone() for name, buffer in parts.net.named_buffers()}
        self._seed(step)
        with one_value_is_a_matter_of_the_batch(parts.sampler):
            self._run(len(batches), batches, counted=counted, scale=1.0, before_last_backward=lambda total: None)
        self.clear()
        for name, buffer in parts.net.named_buffers():
            buffer.copy_(buffers[name])

    def make(self, share: Share, step: int) -> Agreed:
        """Forward and backward; the loss of this rank is on its way to the others when the last backward begins.

        Returns what all ranks know then.
        """
        parts = self._parts
        parts.marks.work()
        self._seed(step)
        count = len(share.micro_batches)
        # ranks average their gradients: this makes the average the mean over all samples, whoever has how many
        scale = (1 if parts.shared.sums_gradients else parts.grid.degrees.data) / share.global_count
        batches, tell = watched(parts.profiler, self.feed.take(count)), partial(self._send, share)
        self._run(count, batches, counted=share.counted, scale=scale, before_last_backward=tell)
        self._send_late()
        agreed = self._agreement.receive()
        parts.report.forget(agreed.written)
        self._buffers.receive()
        parts.precision.unscale(parts.optimizer)
        return agreed

    def problem(self, agreed: Agreed) -> tuple[str, bool]:
        """What is wrong with the loss or the gradients, the same on every rank; empty where nothing is.

        And whether it is the gradients alone.
        """
        parts = self._parts
        if problem := loss_problem(agreed.sums, ranks=parts.grid.degrees.data):
            return problem, False
        finding = self._check.look()
        self.norm = finding.norm
        return finding.problem, True

    def clear(self) -> None:
        """Forget them. The optimizer's own `zero_grad` takes ten times as long."""
        for parameter in self._parameters:
            parameter.grad = None

    def clip(self) -> None:
        """Scale them down to `train.clip_norm`, where that is given and they are longer."""
        if self._parts.clip_norm is not None:
            self._check.clip(self.norm, self._parts.clip_norm)

    def _run(
        self,
        count: int,
        batches: Iterable[Batch],
        *,
        counted: int,
        scale: float,
        before_last_backward: Callable[[Tensor], None],
    ) -> None:
        parts = self._parts
        work = Pass(
            batches=iter(batches),
            count=count,
            counted=counted,
            loss=parts.task.loss,
            loss_gradient=None if parts.precision.may_overflow else self._loss_gradient(scale),
            scaled=lambda loss: parts.precision.scaled(loss * scale),
            precision=parts.precision.around_forward,
            before_forward=parts.marks.rest,  # the network's own forward is work again
            before_last_backward=before_last_backward,
        )
        parts.shared.run(work)

    def _loss_gradient(self, scale: float) -> Tensor:
        """The same for as long as batches are whole."""
        if scale != self._scale:
            self._scale, self._scale_tensor = scale, torch.tensor(scale, device=self._parts.device)
        return self._scale_tensor

    def _here(self, batch: Batch) -> Batch:
        inputs, targets = batch
        device = self._parts.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def _send(self, share: Share, total: Tensor) -> None:
        parts = self._parts
        counts = share.local_count if parts.grid.speaks else 0
        if counts and parts.device.type == "cuda":  # to wait for it here, the GPU would have to wait for its backward
            self._late = read_later(total), counts
        else:
            self._agreement.send_with_gradients(
                *loss_message(total.item() if counts else 0.0, counts, parts.world.rank)
            )
        parts.marks.rest()
        self._buffers.send()

    def _send_late(self) -> None:
        """The loss of a GPU, which is there as soon as its forwards are through, and its backward is in the queue."""
        if self._late is not None:
            (read, counts), self._late = self._late, None
            self._agreement.send_with_gradients(*loss_message(read(), counts, self._parts.world.rank))

    def any_rank(self, finding: bool) -> bool:
        """Whether any rank has found something; every rank must ask."""
        return self._add(float(finding))[0] > 0

    def _add(self, *values: float) -> Sequence[float]:
        return self._agreement.now(*values).sums

    def _seed(self, step: int) -> None:
        """Random draws of a step (dropout) depend on the step and the share, not on what was drawn before."""
        parts = self._parts
        stage = parts.grid.place["pp"]  # not of tp: what its ranks compute alike must be dropped alike
        seed = derive_seed("step", parts.sampler.seed, step, parts.grid.data_rank, *([stage] if stage else []))
        torch.default_generator.manual_seed(seed)
        if parts.device.type == "cuda":
            torch.cuda.manual_seed(seed)


def read_later(number: Tensor) -> Callable[[], float]:
    """Begin to copy a number from a GPU; what is returned waits for that, and for nothing that was queued after it."""
    copy = torch.empty((), dtype=number.dtype, pin_memory=True)
    copy.copy_(number, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> float:
        copied.synchronize()
        return copy.item()

    return read
