"""PPO on two machines, under the shipped file for two nodes: a process is killed, the cable is cut, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from align.core.heartbeat import EXIT_LOST
from align.model_registry.registry import resolve_model
from tests.launch.compared import metrics
from tests.launch.launcher import IN_TURN, PPO, ROOT, ppo_words, variables

UPDATES = 8
LOST_AFTER = 6.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Host:
    """One of the two machines: a network namespace with an address and a loopback device."""

    def __init__(self, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number + 1}"
        self.name, self.device = f"align-{os.getpid()}-{number}", f"veth{number}"

    def cable(self, state: str) -> None:
        """Pull the cable out (`down`), or put it in (`up`)."""
        _ip("-n", self.name, "link", "set", self.device, state)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines that reach each other and nothing else. Skips, in one line, where namespaces are not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("two machines need the command ip: install the package iproute2")
    first, second = Host(0), Host(1)
    try:
        try:
            for host in (first, second):
                _ip("netns", "add", host.name)
            _ip(*f"link add {first.device} netns {first.name} type veth".split(), "peer", "name", second.device,
                "netns", second.name)  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two machines need network namespaces, which this machine does not permit: {error.stderr.strip()}")
        for host in (first, second):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.cable("up")
        yield first, second
    finally:
        for host in (first, second):
            with suppress(subprocess.CalledProcessError, FileNotFoundError):
                _ip("netns", "del", host.name)


def start(host: Host, folder: Path, scripts: list[list[str]]) -> "subprocess.Popen[str]":
    """The shipped launcher's file on one machine, with one process on its CPU instead of eight on its GPUs."""
    path = folder / f"scripts-{host.number}.json"
    path.write_text(json.dumps(scripts))
    launcher = ["launch", "--config_file", "configs/accelerate/two-nodes.yaml", "--num_processes", "2"]
    launcher += ["--main_process_ip", "10.77.0.1", "--machine_rank", str(host.number)]
    program = ["ip", "netns", "exec", host.name, sys.executable, "-c", "from align.cli import main; main()"]
    # gloo needs the device where a machine's own name says nothing of its addresses.
    environment = variables() | {"GLOO_SOCKET_IFNAME": host.device, "LOST_AFTER": str(LOST_AFTER)}
    with open(folder / f"printed-{host.number}.txt", "w", encoding="utf-8") as printed:
        words = [*program, *launcher, str(IN_TURN), str(path)]
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=printed, stderr=printed)


def wait_for_update(folder: Path, update: int, processes: list["subprocess.Popen[str]"]) -> None:
    file = folder / "checkpoints" / f"update-{update:06d}" / "trainer.json"
    while not file.exists():
        assert all(process.poll() is None for process in processes), "it ended before the checkpoint was written"
        time.sleep(0.05)


def end(processes: list["subprocess.Popen[str]"], folder: Path, seconds: float) -> tuple[list[int], list[str]]:
    """The exit codes and words of both machines, which must end within so many seconds."""
    until = time.monotonic() + seconds
    codes = [process.wait(timeout=max(0.1, until - time.monotonic())) for process in processes]
    return codes, [(folder / f"printed-{number}.txt").read_text() for number in (0, 1)]


def rank_process(process: "subprocess.Popen[str]", rank: int) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(rank))


@pytest.mark.slow
def test_two_machines_lose_a_process_and_the_cable_and_end_with_the_same_weights(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    resolve_model("tiny-llama")  # once, not on both machines at the same time
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    more = ["--resume_from_checkpoint", "auto", "--collective_timeout", "120", "--save_total_limit", "0"]
    of_broken = [PPO, *ppo_words("tiny-llama", broken, UPDATES, *more)]
    of_whole = [PPO, *ppo_words("tiny-llama", whole, UPDATES, *more)]

    # A process of the second machine is killed: both launches end within a minute, and the first says which one it lost.
    processes = [start(host, tmp_path, [of_broken]) for host in hosts]
    wait_for_update(broken, 2, processes)
    rank_process(processes[1], 1).send_signal(signal.SIGKILL)
    codes, printed = end(processes, tmp_path, 60)
    assert codes == [EXIT_LOST, 128 + signal.SIGKILL], printed
    assert "error: lost process 1 (" in printed[0]
    assert "error: process 1 failed first (signal SIGKILL)" in printed[1]

    # The cable is cut: nobody is killed, each machine names the process that it cannot reach any more.
    processes = [start(host, tmp_path, [of_broken]) for host in hosts]
    wait_for_update(broken, 5, processes)
    hosts[1].cable("down")
    codes, printed = end(processes, tmp_path, 60)
    assert codes == [EXIT_LOST, EXIT_LOST], printed
    for rank, text in ((1, printed[0]), (0, printed[1])):
        (line,) = (line for line in text.splitlines() if f"error: lost process {rank} (" in line)
        assert f"no heartbeat for {LOST_AFTER:g} s" in line
    assert not any("Traceback" in text for text in printed)

    # The cable is back: the run goes on, and a second one that nobody disturbs is its equal.
    hosts[1].cable("up")
    processes = [start(host, tmp_path, [of_broken, of_whole]) for host in hosts]
    codes, printed = end(processes, tmp_path, 600)
    assert codes == [0, 0], printed
    assert "resumed from" in printed[0]
    assert metrics(broken) == metrics(whole)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (broken, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
