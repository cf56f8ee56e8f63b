"""Machines that are reached through something else: a node of the job that this process is in, a container."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.executors.docker_words import refusal
from launcher.executors.machines import Done, Machine, ThisMachine, Unreachable

_REFUSED = 125
"""Exit code of `docker run` where it has started nothing."""


class JobNode:
    """A node of the allocation of SLURM that this process is in, by srun."""

    def __init__(self, name: str) -> None:
        self._name, self._here = name, ThisMachine()

    @property
    def name(self) -> str:
        """As SLURM has it."""
        return self._name

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Done:  # noqa: A002 - as subprocess
        """Run a command there, beside what runs in the job already. Raises Unreachable."""
        step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={self._name}", "--mpi=none", "--quiet")
        return self._here.run((*step, *argv), input=input, timeout_s=timeout_s)


class Container:
    """A container of an image on a machine, a new one for each command. It is gone with it.

    options: further words of `docker run`.
    """

    def __init__(self, machine: Machine, image: str, options: Sequence[str] = ()) -> None:
        self._machine, self._image, self._options = machine, image, tuple(options)

    @property
    def name(self) -> str:
        """`node0: launcher:cpu`."""
        return f"{self._machine.name}: {self._image}" if self._machine.name else f"a container of {self._image}"

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float) -> Done:  # noqa: A002 - as subprocess
        """Run a command in a container that shares the network of its machine. Raises Unreachable.

        An image that is not there is not fetched.
        """
        words = ("docker", "run", "--rm", "--interactive", "--pull", "never", "--init", "--network", "host")
        line = (*words, *self._options, "--entrypoint", "", self._image, *argv)
        done = self._machine.run(line, input=input, timeout_s=timeout_s)
        if done.code == _REFUSED:
            problem = refusal(done.words, machine=self._machine.name, image=self._image)
            raise Unreachable(problem.message, problem.hint)
        return done
