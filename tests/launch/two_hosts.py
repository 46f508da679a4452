"""Two machines on one: network namespaces with an address and a loopback device of their own, joined by one cable."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Host:
    """One of the two machines."""

    def __init__(self, number: int) -> None:
        self.number, self.address = number, ADDRESSES[number]
        self.name, self.device = f"align-{os.getpid()}-{number}", f"veth{number}"

    @property
    def before(self) -> list[str]:
        """Words before a command that runs on this machine."""
        return ["ip", "netns", "exec", self.name]

    @property
    def environment(self) -> dict[str, str]:
        """What gloo needs to know where a machine's own name says nothing of its addresses."""
        return {"GLOO_SOCKET_IFNAME": self.device}

    def cable(self, state: str) -> None:
        """Pull the cable out (`down`), or put it in (`up`)."""
        _ip("-n", self.name, "link", "set", self.device, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
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
