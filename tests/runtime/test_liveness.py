"""Processes that watch each other: who is killed is named by all others, who ends in order is missed by nobody."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from align.core.liveness import EXIT_LOST
from align.core.signals import EXIT_STOPPED

SCRIPT = Path(__file__).with_name("watched.py")


@pytest.fixture
def three() -> Iterator[list[subprocess.Popen[str]]]:
    """Three processes, the first of which the others have reached."""
    made: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        program = [sys.executable, str(SCRIPT), *words]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        made.append(subprocess.Popen(program, text=True, **pipes))
        return made[-1]

    listener = read(start("0")).split()
    for rank in ("1", "2"):
        start(rank, *listener)
    for process in made:
        assert read(process) == "watching"
    made[0].listener = listener  # type: ignore[attr-defined]
    time.sleep(0.3)  # until the first one has read who the others are
    yield made
    for process in made:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def obey(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    code = process.wait(timeout=20)  # its stdin stays open: it goes on until it is told to leave
    assert process.stderr
    return code, process.stderr.read()


def test_a_killed_process_is_named_by_all_others(three: list[subprocess.Popen[str]]) -> None:
    three[2].kill()
    lost = "error: lost process 2 (127.0.0.1: its connection was closed); --resume auto goes on from the last checkpoint\n"
    assert end(three[0]) == (EXIT_LOST, lost)
    assert end(three[1]) == (EXIT_LOST, f"[process 1] {lost}")


def test_the_first_process_is_named_too(three: list[subprocess.Popen[str]]) -> None:
    three[0].kill()
    for rank in (1, 2):
        code, printed = end(three[rank])
        assert (code, printed.count("\n")) == (EXIT_LOST, 1)
        assert f"[process {rank}] error: lost process 0 (127.0.0.1: its connection was closed)" in printed


@pytest.mark.parametrize("first", [0, 1])
def test_an_end_in_order_ends_nobody(three: list[subprocess.Popen[str]], first: int) -> None:
    obey(three[first], "0")
    assert end(three[first]) == (0, "")
    time.sleep(1.5)
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
        assert f"error: lost process {rank} (127.0.0.1: it ended: {reason})" in printed


def test_the_first_cause_is_told_by_a_first_process_that_is_asked_to_stop_because_of_it(
    three: list[subprocess.Popen[str]],
) -> None:
    """Its launcher ends it by SIGTERM when another process of its machine has failed; a third is on another machine."""
    obey(three[1], "0 2 a mistake")
    assert end(three[1]) == (0, "")
    time.sleep(0.2)  # less than SAME_MACHINE_SECONDS: it has read the end of process 1, and told nobody yet
    obey(three[0], "0 75 stopped by SIGTERM")
    code, printed = end(three[2])
    assert code == 2
    assert "error: lost process 1 (127.0.0.1: it ended: a mistake)" in printed


def test_all_that_end_by_the_same_error_say_nothing_more(three: list[subprocess.Popen[str]]) -> None:
    for process in three:
        obey(process, "1.5 2 a mistake")  # it still runs for longer than the time of grace
    assert [end(process) for process in three] == 3 * [(0, "")]


@pytest.mark.parametrize("words", [b"", b"hello world\n", b"\xff\x00\n\n", b"x" * 200_000])
def test_strangers_at_the_door_change_nothing(three: list[subprocess.Popen[str]], words: bytes) -> None:
    port = int(three[0].listener[0])  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):  # it may be thrown out
        stranger.sendall(words)
    time.sleep(0.8)
    assert three[0].poll() is None
    three[1].kill()
    assert "lost process 1" in end(three[0])[1]
