from __future__ import annotations

import os
import signal

import pytest

from launcher.cli.signals import Requests, SignalInbox

TERM, INT, USR1, USR2 = (int(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))


@pytest.mark.parametrize(
    ("told", "passed"),
    [
        ([(0.0, TERM)], [TERM]),
        ([(0.0, INT), (0.1, INT)], [INT, INT]),  # a person who means it
        ([(0.0, USR2)], [TERM]),
        ([(0.0, USR2), (0.0, TERM)], [TERM]),
        ([(0.0, USR1), (1.9, TERM)], [TERM]),
        ([(0.0, USR1), (30.0, TERM)], [TERM, TERM]),  # the end of the time that the warning gave
        ([(0.0, USR1), (30.0, USR2)], [TERM]),
        ([(0.0, TERM), (0.1, USR1), (0.2, TERM)], [TERM, TERM]),
    ],
)
def test_a_warning_and_the_term_behind_it_are_one_request(told: list[tuple[float, int]], passed: list[int]) -> None:
    """F049."""
    requests = Requests()
    assert [signum for time_s, sent in told for signum in requests.of([sent], time_s)] == passed


def test_warnings_are_collected_and_end_nobody() -> None:
    with SignalInbox() as inbox:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        received: list[int] = []
        while len(received) < 2:
            received += inbox.wait(1.0)
    assert sorted(received) == sorted([USR2, TERM])
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
