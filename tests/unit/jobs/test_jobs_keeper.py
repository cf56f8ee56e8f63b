"""What a rank says it holds, and when nothing of its state may change any more."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jobs.keeper as module
from jobs.keeper import AttemptOverError, Keeper, is_peer_lost
from jobs.sockets import GroupSockets
from jobs.state import CheckpointError
from jobs.world import PeerError

WAIT_S = 20.0


class Training:
    """Counts steps; what is written is the step that was noted."""

    def __init__(self, step: int) -> None:
        self.step, self.noted = step, -1
        self.problem: Exception | None = None

    def note(self) -> int:
        self.noted = self.step
        return self.step

    def write(self, folder: Path) -> str:
        if self.problem:
            raise self.problem
        (folder / f"step-{self.noted}").touch()
        return f"step-{self.noted}"


class Agent:
    """The other end."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(WAIT_S)
        self.fd = theirs.detach()
        """The keeper's end."""
        os.set_inheritable(self.fd, True)  # as a worker has it from its agent
        self.sockets = GroupSockets(store_port=1)
        keeper = Keeper.start({"LAUNCH_CONTROL_FD": str(self.fd)}, self.sockets, torch.device("cpu"))
        assert keeper is not None
        self.keeper = keeper

    def order(self, **order: Any) -> None:
        self._sock.send(json.dumps(order).encode())

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._sock.recv(1 << 16))
        return message

    def report(self) -> int | None:
        self.order(order="report")
        held: int | None = self.hear()["holds"]
        return held

    def keep(self, folder: Path) -> dict[str, Any]:
        self.order(order="keep", folder=str(folder))
        return self.hear()

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def step(keeper: Keeper, training: Training) -> None:
    with keeper.changing():
        training.step += 1


def test_without_an_agent_there_is_no_keeper() -> None:
    assert Keeper.start({}, GroupSockets(store_port=1), torch.device("cpu")) is None


def test_what_is_reported_is_kept_and_no_step_is_completed_after_that(agent: Agent, tmp_path: Path) -> None:
    training = Training(4)
    agent.keeper.hold(training)
    step(agent.keeper, training)
    assert not agent.keeper.is_over
    assert agent.report() == 5
    assert agent.keeper.is_over
    with pytest.raises(AttemptOverError):
        step(agent.keeper, training)
    assert training.step == 5
    assert agent.keep(tmp_path) == {"kept": "step-5"}
    assert (tmp_path / "step-5").exists()


def test_before_the_first_step_there_is_nothing_to_keep(agent: Agent, tmp_path: Path) -> None:
    assert agent.report() is None
    assert agent.keep(tmp_path) == {"not_kept": "there is no whole state"}


def test_while_the_training_may_go_on_nothing_is_kept(agent: Agent, tmp_path: Path) -> None:
    agent.keeper.hold(Training(4))
    assert agent.keep(tmp_path) == {"not_kept": "there is no whole state"}
    assert not list(tmp_path.iterdir())


def test_a_report_wakes_whoever_waits_for_a_dead_peer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()
    monkeypatch.setattr(agent.sockets, "shut", woken.set)
    agent.keeper.hold(Training(4))
    assert agent.report() == 4
    assert woken.is_set()


def test_a_process_that_the_training_starts_does_not_get_the_socket(agent: Agent) -> None:
    assert not os.get_inheritable(agent.fd)


def test_at_step_0_there_is_nothing_to_lose(agent: Agent) -> None:
    agent.keeper.hold(Training(0))
    assert agent.report() is None


def test_a_report_waits_for_the_step_that_is_being_completed(agent: Agent) -> None:
    training = Training(4)
    agent.keeper.hold(training)
    with agent.keeper.changing():
        agent.order(order="report")
        while not agent.keeper.is_over:
            pass
        training.step += 1
    assert agent.hear() == {"holds": 5}


def test_a_step_that_takes_too_long_is_not_waited_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANGE_S", 0.05)
    training = Training(4)
    agent.keeper.hold(training)
    with agent.keeper.changing():
        assert agent.report() is None
        training.step += 1


def test_what_raises_in_the_middle_of_a_step_leaves_nothing_to_keep(agent: Agent, tmp_path: Path) -> None:
    training = Training(4)
    agent.keeper.hold(training)
    with pytest.raises(ZeroDivisionError), agent.keeper.changing():
        raise ZeroDivisionError
    assert agent.report() is None
    assert agent.keep(tmp_path) == {"not_kept": "there is no whole state"}


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), CheckpointError("no plain number")])
def test_why_it_could_not_be_kept_is_said(agent: Agent, tmp_path: Path, problem: Exception) -> None:
    training = Training(4)
    training.problem = problem
    agent.keeper.hold(training)
    assert agent.report() == 4
    assert agent.keep(tmp_path) == {"not_kept": f"{type(problem).__name__}: {problem}"}


def test_a_lost_peer_is_said_and_orders_are_waited_for_but_not_for_ever(
    agent: Agent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.keeper.hold(Training(4))
    told = "[/src/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash.!"
    error = RuntimeError(f"{told}\nmore of it")
    waiting = threading.Thread(target=agent.keeper.wait_for_orders, args=(error,), kwargs={"step": 4, "limit_s": 0.3})
    waiting.start()
    assert agent.hear() == {"peer_lost": f"RuntimeError: {error}", "step": 4}
    assert (agent.report(), agent.keep(tmp_path)) == (4, {"kept": "step-4"})
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    said = "lost a peer (RuntimeError: Connection closed by peer [127.0.0.1]:1); waiting for the agent\n"
    assert capsys.readouterr().out == said


def test_where_the_agent_has_ended_an_attempt_nobody_is_called_lost(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.report() is None
    agent.keeper.wait_for_orders(RuntimeError("Connection closed by peer"), step=4, limit_s=0.0)
    assert capsys.readouterr().out == "this attempt is over; waiting for the agent\n"


def test_a_checkpoint_on_disk_is_told(agent: Agent) -> None:
    agent.keeper.saved(20)
    assert agent.hear() == {"saved": 20}


def test_an_agent_that_is_gone_is_no_error(agent: Agent) -> None:
    agent.close()
    agent.keeper.saved(20)
    agent.keeper.wait_for_orders(RuntimeError("x"), step=None, limit_s=0.0)


def test_which_errors_mean_that_a_peer_is_lost() -> None:
    for text in ("Connection closed by peer [10.0.0.1]:123", "Read error [::1]:5: Connection reset by peer",
                 "Timed out waiting 3000ms for recv operation to complete"):  # fmt: skip
        assert is_peer_lost(RuntimeError(text)), text
    assert is_peer_lost(PeerError("rank 1 could not prepare the data"))
    assert is_peer_lost(AttemptOverError())
    wrapped = CheckpointError("step-5 could not be read")
    wrapped.__cause__ = RuntimeError("Broken pipe")
    assert is_peer_lost(wrapped)
    for error in (FloatingPointError("loss is nan"), RuntimeError("shape mismatch"), CheckpointError("x"), None):
        assert not is_peer_lost(error)
