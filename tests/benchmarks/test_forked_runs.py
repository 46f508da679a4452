"""Processes that are killed on purpose: what counts as their end, and that none is left behind."""

import multiprocessing
import sys
import time

import pytest

from benchmarks import forked_runs
from benchmarks.forked_runs import Killed


def forked(*lives):
    """Processes that wait so many seconds and exit with a code."""

    def live(seconds, code):
        time.sleep(seconds)
        sys.exit(code)

    processes = [multiprocessing.get_context("fork").Process(target=live, args=life) for life in lives]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize(
    ("lives", "killed", "code"),
    [
        ([(0, 0), (0.2, 0)], Killed(), 0),
        ([(60, 0), (60, 0)], Killed(seconds=0.1, alone=False), -9),
        ([(0.3, 1), (60, 0)], Killed(1, seconds=0.1), -9),  # the other one notices, and ends by itself
        ([(0, 0)], Killed(seconds=30), 0),  # it ended sooner
        ([(0.1, 1), (0.2, 0)], Killed(), 1),  # a failure that nobody asked for
    ],
)
def test_the_code_of_all_is_that_of_a_kill_or_of_a_failure(lives, killed, code):
    assert forked_runs._end(forked(*lives), killed) == code


def test_a_process_that_waits_for_a_killed_one_for_ever_is_ended_and_told(monkeypatch):
    monkeypatch.setattr(forked_runs, "LOST_SECONDS", 0.2)
    processes = forked((60, 0), (60, 0))
    with pytest.raises(SystemExit, match=r"1 processes did not end in 0 s after another one: \[-9, -9\]"):
        forked_runs._end(processes, Killed(1, seconds=0.1))
    assert not any(process.is_alive() for process in processes)
