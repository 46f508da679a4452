"""Processes that watch each other: all others name one that is killed or hangs; an end in order ends nobody."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from align.core.liveness import EXIT_LOST
from align.core.signals import EXIT_STOPPED
from tests.launch.launcher import free_port

SCRIPT = Path(__file__).with_name("watched.py")
LOST = "error: lost process {} ({}: no sign of life for 4 s); --resume auto continues from the last checkpoint\n"


@pytest.fixture
def three() -> Iterator[list[subprocess.Popen[str]]]:
    """Three processes that watch each other."""
    pipes, port = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), str(free_port())
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    programs = [[sys.executable, str(SCRIPT), rank, port] for rank in ("0", "1", "2")]
    made = [subprocess.Popen(program, text=True, env=variables, **pipes) for program in programs]
    for process in made:
        assert process.stdout
        assert process.stdout.readline() == "watching\n"
    yield made
    for process in made:
        process.kill()
        process.communicate()


def obey(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    code = process.wait(timeout=60)  # its stdin stays open: it goes on until it is told to leave
    assert process.stderr
    return code, "".join(line for line in process.stderr.readlines() if "error: " in line)  # torch's C++ may write more


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_is_named_by_all_others(
    three: list[subprocess.Popen[str]], rank: int, number: signal.Signals
) -> None:
    three[rank].send_signal(number)
    lost = LOST.format(rank, socket.gethostname())
    for other in {0, 1, 2} - {rank}:
        assert end(three[other]) == (EXIT_LOST, f"[process {other}] {lost}" if other else lost)


def test_a_failed_exchange_names_the_lost_process_sooner(three: list[subprocess.Popen[str]]) -> None:
    three[2].kill()
    obey(three[1], "exchange")
    code, printed = end(three[1])
    assert code == EXIT_LOST
    assert f"lost process 2 ({socket.gethostname()}: no sign of life for 1 s)" in printed


@pytest.mark.parametrize("first", [0, 1])
def test_an_end_in_order_ends_nobody(three: list[subprocess.Popen[str]], first: int) -> None:
    obey(three[first], "6")
    time.sleep(5)  # longer than LOST_AFTER
    assert three[2].poll() is None
    obey(three[2], "0")
    assert end(three[2]) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("code", "reason"), [(2, "prompts.jsonl: no such file"), (EXIT_STOPPED, "stopped by SIGTERM")])
def test_an_end_of_one_process_is_told_to_those_that_would_wait_for_it(
    three: list[subprocess.Popen[str]], rank: int, code: int, reason: str
) -> None:
    obey(three[rank], f"0 {code} {reason}")
    assert end(three[rank]) == (0, "")
    for other in {0, 1, 2} - {rank}:
        ended, printed = end(three[other])
        assert ended == code, "a mistake is one on every machine, and no lost process"
        assert f"error: lost process {rank} ({socket.gethostname()}: it ended: {reason})" in printed


def test_the_first_cause_is_told_by_a_first_process_that_is_asked_to_stop_because_of_it(
    three: list[subprocess.Popen[str]],
) -> None:
    """Its launcher ends it by SIGTERM when another process of its machine has failed; a third is on another machine."""
    obey(three[1], "0 2 a mistake")
    assert end(three[1]) == (0, "")
    obey(three[0], "0 75 stopped by SIGTERM")
    code, printed = end(three[2])
    assert code == 2
    assert "error: lost process 1 " in printed
    assert "it ended: a mistake" in printed


def test_all_that_end_by_the_same_error_say_nothing_more(three: list[subprocess.Popen[str]]) -> None:
    for process in three:
        obey(process, "1.5 2 a mistake")  # it still runs for longer than the time of grace
    assert [end(process) for process in three] == 3 * [(0, "")]
