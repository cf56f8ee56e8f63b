"""What the agent sees of this rank from outside: where it is, and how long its own work takes in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from launcher.runs.clock import Phase, StepPage


class Marks:
    """Marks the page that this rank shares with its agent. Outside a run there is none, and nothing happens.

    Own work is what this rank does without the others: reading its samples, its forward, its optimizer. The rank whose
    own work takes long is the one that the others wait for; the time of a whole step is the same on all of them.
    """

    def __init__(self, page: StepPage | None = None) -> None:
        self._page = page
        self._phase = Phase.START
        self._begun_ns = 0
        self._own_ns = 0

    def at(self, phase: Phase, step: int) -> None:
        """This rank gets on, here. The first step counts as done when STEP is marked for the first time."""
        self._phase = phase
        if self._page is not None:
            self._page.mark(phase, step)

    def step(self, step: int) -> None:
        """A step is complete, and so is the own work that it took."""
        if self._page is not None:
            self.rest()
            self._page.add_own(self._own_ns)
            self._own_ns = 0
        self.at(Phase.STEP, step)

    @contextmanager
    def during(self, phase: Phase, step: int) -> Iterator[None]:
        """Evaluate or save; then this rank is where it was before."""
        before = self._phase
        self.at(phase, step)
        yield
        self.at(before, step)

    def work(self) -> None:
        """From here on it is own work."""
        if self._page is not None:
            self._begun_ns = time.perf_counter_ns()

    def rest(self) -> None:
        """From here on others are waited for."""
        if self._begun_ns:
            self._own_ns += time.perf_counter_ns() - self._begun_ns
            self._begun_ns = 0

    def watch_forward(self, net: nn.Module) -> None:
        """Own work goes on when the network itself begins: what wraps it waits for other ranks before that."""
        if self._page is not None:
            net.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, net: nn.Module, inputs: Any) -> None:
        self._begun_ns = time.perf_counter_ns()
