import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from align.core import heartbeat
from align.core.heartbeat import EXIT_LOST
from align.core.signals import EXIT_STOPPED
from tests.ports import free_port

SCRIPT = Path(__file__).with_name("watched.py")
LOST = "error: lost process {} ({}: no heartbeat for 4 s); "
LOST += "resume from the latest checkpoint with --resume_from_checkpoint auto\n"


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


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGKILL, 0),
        (signal.SIGSTOP, 2),
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_or_stopped_is_named_by_all_others(
    three: list[subprocess.Popen[str]], rank: int, number: signal.Signals
) -> None:
    three[rank].send_signal(number)
    lost = LOST.format(rank, socket.gethostname())
    for other in {0, 1, 2} - {rank}:
        assert end(three[other]) == (EXIT_LOST, f"[process {other}] {lost}" if other else lost)


@pytest.mark.parametrize("killed", [2, 0])  # the first one holds the store
def test_a_failed_exchange_names_the_lost_process_sooner(three: list[subprocess.Popen[str]], killed: int) -> None:
    three[killed].kill()
    obey(three[1], "exchange")
    code, printed = end(three[1])
    assert code == EXIT_LOST
    assert f"lost process {killed} ({socket.gethostname()}: no heartbeat for 1 s);" in printed


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[heartbeat.Watch], str]:
    """The verdict of a watch without exchanges after a moment."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)

    def judge(watch: heartbeat.Watch) -> str:
        thread = threading.Thread(target=watch._judge, daemon=True)
        thread.start()
        time.sleep(0.3)
        watch.finished.set()
        thread.join()
        return watch.verdict

    return judge


def test_a_failed_exchange_blames_no_process_whose_heartbeat_was_not_read_before(judged) -> None:
    watch = heartbeat.Watch(HashStore(), 1, 3)
    watch.seen = {0: time.monotonic()} | dict.fromkeys((1, 2), time.monotonic() - 3600)  # as an hour after the start
    watch.watch_all()
    assert not judged(watch)


def test_a_process_that_was_suspended_blames_nobody_when_it_wakes(judged, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = heartbeat.Watch(HashStore(), 1, 3)
    watch.seen = dict.fromkeys(range(3), time.monotonic())
    times = iter([time.monotonic()])
    awake = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: next(times, awake() + 3600))
    assert not judged(watch)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_end_in_order_ends_nobody(three: list[subprocess.Popen[str]], first: int) -> None:
    obey(three[first], "6")
    time.sleep(5)  # longer than LOST_AFTER
    assert three[2].poll() is None
    obey(three[2], "0")
    assert end(three[2]) == (0, "")


def test_all_that_end_by_the_same_error_say_nothing_more(three: list[subprocess.Popen[str]]) -> None:
    for process in three:
        obey(process, "1.5 2 a mistake")  # it still runs for longer than the time of grace
    assert [end(process) for process in three] == 3 * [(0, "")]


@pytest.mark.parametrize(
    ("rank", "code", "reason"),
    [
        (0, 2, "prompts.jsonl: no such file"),
        (1, EXIT_STOPPED, "stopped by SIGTERM"),
        pytest.param(1, 2, "prompts.jsonl: no such file", marks=pytest.mark.slow),
        pytest.param(0, EXIT_STOPPED, "stopped by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_an_end_of_one_process_is_told_to_those_that_would_wait_for_it(
    three: list[subprocess.Popen[str]], rank: int, code: int, reason: str
) -> None:
    obey(three[rank], f"0 {code} {reason}")
    assert end(three[rank]) == (0, "")
    for other in {0, 1, 2} - {rank}:
        ended, printed = end(three[other])
        assert ended == code, "a mistake is one on every machine, and no lost process"
        assert f"error: lost process {rank} ({socket.gethostname()}: exited: {reason})" in printed


def test_a_process_ends_though_the_first_one_hangs_with_the_store(three: list[subprocess.Popen[str]]) -> None:
    three[0].send_signal(signal.SIGSTOP)
    time.sleep(1)  # an exchange with the store is going on, and less than LOST_AFTER has passed
    obey(three[1], "0 2 a mistake")
    assert end(three[1]) == (0, "")


def test_a_heartbeat_that_is_being_written_does_not_replace_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    store, begun, beat = HashStore(), threading.Event(), heartbeat.Watch._beat

    def slow(watch: heartbeat.Watch, count: int) -> None:
        if count:
            begun.set()
            time.sleep(0.3)
        beat(watch, count)

    monkeypatch.setattr(heartbeat.Watch, "_beat", slow)
    store.set("0", "here 0")
    watch = heartbeat.Watch(store, 1, 2)
    watch.start()
    assert begun.wait(10)
    watch.leave("", 0)
    time.sleep(0.5)
    assert store.get("1") == heartbeat.LEFT


def test_the_first_cause_is_told_by_a_first_process_that_is_asked_to_stop_because_of_it(
    three: list[subprocess.Popen[str]],
) -> None:
    """Its launcher ends it by SIGTERM when another process of its machine has failed; a third is on another machine."""
    obey(three[1], "0 2 a mistake")
    time.sleep(0.1)  # it has told its end, and the first process is still within its time of grace
    obey(three[0], "0 75 stopped by SIGTERM")
    assert end(three[1]) == (0, "")
    code, printed = end(three[2])
    assert code == 2
    assert "error: lost process 1 " in printed
    assert "exited: a mistake" in printed


def test_the_first_process_prints_its_error_before_a_launcher_ends_it() -> None:
    watch = heartbeat.Watch(HashStore(), 0, 2)
    begun = time.monotonic()
    watch.leave("a mistake", 2)
    assert time.monotonic() < begun + heartbeat.BEAT_SECONDS
    assert any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()), "it stays"
