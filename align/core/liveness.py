"""Notices a process of the same run that is gone: it was killed, its machine is down, or the network is cut.

NCCL and gloo wait in vain for such a process until their timeout, half an hour by default, and then do not say which one
it was. Here each process keeps a connection to the first one. The kernel closes it when a process dies, and the kernel's
keep-alive probes notice a machine that is silent, also while Python is busy for minutes. The first process tells all
others which process is lost; each prints a line and ends with exit code 76, or with that of a process that ended by an error
which it could still tell.
"""

import errno
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import NamedTuple, NoReturn

EXIT_LOST = 76
"""Exit code of a run that lost a process, or waited in vain for one: EX_PROTOCOL of sysexits.h."""
GRACE_SECONDS = 5.0
"""From the loss of a process to the end of the others. A launcher ends the processes of its machine sooner, and an error of
their own is printed first."""
CONNECT_SECONDS = 30.0
SAME_MACHINE_SECONDS = 0.5
"""Processes that are lost within this time are named together: a machine has several."""
LONGEST_LINE = 2**16
PROBES = 3
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of the kernel when no probe was answered; the last two if it knows no route to the machine."""
UNKNOWN, ENDED = "unknown client", "ended"  # reasons for a closed connection that are no loss


class Listener(NamedTuple):
    """The port on which the first process listens, and the token that the others identify themselves with."""

    port: int
    token: str


class Peer:
    """A connection to another process: lines of text, and the kernel's probes.

    Args:
        connection: connected; it stays blocking.
        rank: of the other process; None: not known yet.
        lost_after: seconds of silence after which the kernel closes the connection.
    """

    def __init__(self, connection: socket.socket, rank: int | None, lost_after: float) -> None:
        self.connection, self.rank, self.lost_after = connection, rank, lost_after
        self.address = connection.getpeername()[0].removeprefix("::ffff:")
        self.unread = b""
        self.lost, self.code = "", EXIT_LOST
        """Why the connection has ended; empty while it has not. And the exit code of a process that ended by an error."""
        interval = max(1, round(lost_after / (2 * PROBES)))
        options = {
            "TCP_KEEPIDLE": max(1, round(lost_after) - PROBES * interval),
            "TCP_KEEPINTVL": interval,
            "TCP_KEEPCNT": PROBES,
            "TCP_USER_TIMEOUT": round(1000 * lost_after),  # for what was sent and is not acknowledged
        }
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __str__(self) -> str:
        return f"process {self.rank} ({self.address}: {self.lost})"

    def receive(self) -> list[list[str]]:
        """Wait for lines; returns each as its first word and the rest. After the last one, `lost` is set."""
        try:
            found = self.connection.recv(LONGEST_LINE)
        except OSError as error:
            found = b""
            silent = error.errno in SILENT
            self.lost = f"no sign of life for {self.lost_after:g} s" if silent else (error.strerror or str(error)).lower()
        if not found or len(self.unread) > LONGEST_LINE:
            self.lost = self.lost or "its connection was closed"
            return []
        *lines, self.unread = (self.unread + found).split(b"\n")
        return [line.decode(errors="replace").split(" ", 1) for line in lines if b" " in line]

    def note_end(self, message: str) -> None:
        """Take the message of a process that ends: empty, or its exit code and the reason."""
        code, _, reason = message.partition(" ")
        if code.isdecimal():
            self.lost, self.code = f"it ended: {reason}", int(code)
        else:
            self.lost = ENDED

    def send(self, word: str, rest: str) -> None:
        """Send a line, if that is still possible."""
        with suppress(OSError):  # the process is lost; the thread that reads from it will notice
            self.connection.sendall(f"{word} {rest}\n".encode())


class Watch(ABC):
    """This process's part of the watch; see `FirstProcess` and `OtherProcess`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.finished = rank, False

    @abstractmethod
    def peers(self) -> list[Peer]:
        """The processes that this one is connected to."""

    @abstractmethod
    def watch(self) -> None:
        """Read from them until one is lost, in a thread of its own."""

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self.watch, daemon=True).start()

    def broadcast(self, word: str, rest: str) -> None:
        """Send a line to all of them."""
        for peer in self.peers():
            peer.send(word, rest)

    def leave(self, message: str) -> None:
        """Tell the others that this process ends, and with what; from now on no loss ends it."""
        self.finished = True
        self.broadcast("ended", message)

    def end(self, code: int, lost: str) -> NoReturn:
        """Print which process is lost, and end this one: it may wait for that one in a call that nothing interrupts."""
        time.sleep(GRACE_SECONDS)
        if self.finished:
            sys.exit()  # only this thread: the run has ended by itself
        prefix = f"[process {self.rank}] " if self.rank else ""
        print(f"{prefix}error: lost {lost}; --resume auto goes on from the last checkpoint", file=sys.stderr, flush=True)
        os._exit(code)


class FirstProcess(Watch):
    """The first process, to which all others are connected."""

    def __init__(self, lost_after: float) -> None:
        super().__init__(0)
        self.lost_after = lost_after
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=4096)
        self.listener = Listener(self.socket.getsockname()[1], secrets.token_hex(16))
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.socket, selectors.EVENT_READ)
        self.peer_of_rank: dict[int, Peer] = {}
        """Replaced, never changed in place: the main thread reads it too."""
        self.lost: list[Peer] = []

    def peers(self) -> list[Peer]:
        return list(self.peer_of_rank.values())

    def watch(self) -> None:
        while not self.finished:
            self._listen(1.0)
            if self.lost:
                self._listen(SAME_MACHINE_SECONDS)
                self.broadcast("lost", " ".join(map(str, self._loss())))
                self.end(*self._loss())
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]

    def leave(self, message: str) -> None:
        if message and self.lost:  # why this process ends: the others are to learn of the first cause
            self.finished = True
            self.broadcast("lost", " ".join(map(str, self._loss())))
        else:
            super().leave(message)

    def _loss(self) -> tuple[int, str]:
        """The exit code and the names of the processes that are lost: a mistake (2) of one may end others (76)."""
        lost = sorted(self.lost, key=lambda peer: peer.rank or 0)
        return min(peer.code for peer in lost), ", ".join(map(str, lost))

    def _listen(self, seconds: float) -> None:
        """Listen for some seconds; the processes that are lost meanwhile join `lost`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.data is None:
                    with suppress(OSError):  # the client has gone already
                        peer = Peer(self.socket.accept()[0], None, self.lost_after)
                        self.selector.register(peer.connection, selectors.EVENT_READ, peer)
                    continue
                self._read(key.data)
                if key.data.lost:
                    self.selector.unregister(key.fileobj)
                    key.data.connection.close()
                    self.peer_of_rank = {rank: peer for rank, peer in self.peer_of_rank.items() if peer is not key.data}
                    self.lost += [key.data] if key.data.lost not in (UNKNOWN, ENDED) else []

    def _read(self, peer: Peer) -> None:
        for word, rest in peer.receive():
            if peer.rank is None:
                if not (secrets.compare_digest(word.encode(), self.listener.token.encode()) and rest.isdecimal()):
                    peer.lost = UNKNOWN
                    return
                peer.rank = int(rest)
                self.peer_of_rank = self.peer_of_rank | {peer.rank: peer}
            elif word == "ended":
                peer.note_end(rest)
        if peer.lost and peer.rank is None:
            peer.lost = UNKNOWN


class OtherProcess(Watch):
    """Any other process, which is connected to the first one.

    Raises:
        OSError: if it cannot be reached.
    """

    def __init__(self, rank: int, host: str, listener: Listener, lost_after: float) -> None:
        super().__init__(rank)
        connection = socket.create_connection((host, listener.port), CONNECT_SECONDS)
        connection.settimeout(None)
        self.first = Peer(connection, 0, lost_after)
        self.first.send(listener.token, str(rank))

    def peers(self) -> list[Peer]:
        return [self.first]

    def watch(self) -> None:
        while not self.first.lost:
            for word, rest in self.first.receive():
                if word == "lost":
                    code, _, names = rest.partition(" ")
                    self.end(int(code), names)
                if word == "ended":
                    self.first.note_end(rest)
        if self.first.lost != ENDED:
            self.end(self.first.code, str(self.first))


_watch: Watch | None = None
_started = False


def started() -> bool:
    """Whether the processes of this run watch each other, or have tried to: the same on all of them."""
    return _started


def start_listening(lost_after: float) -> Listener:
    """Begin to watch, on the first process: listen for the others.

    Args:
        lost_after: seconds of silence after which a process counts as lost.
    """
    global _watch, _started
    first = FirstProcess(lost_after)
    first.start()
    _watch, _started = first, True
    return first.listener


def connect(rank: int, host: str, listener: Listener, lost_after: float) -> None:
    """Begin to watch, on any other process: connect to the first one. If that fails, print a warning and go on.

    Args:
        host: the first process's machine.
        lost_after: as in `start_listening`.
    """
    global _watch, _started
    _started = True
    try:
        other = OtherProcess(rank, host, listener, lost_after)
    except OSError as error:
        why = f"port {listener.port} of {host} cannot be reached ({error.strerror or error})"
        print(f"[process {rank}] warning: {why}: nobody will notice if this process is lost", file=sys.stderr)
        return
    other.start()
    _watch = other


def stop_watching(reason: str = "", code: int = 1) -> None:
    """Tell the others that this process ends, and stop watching them.

    Args:
        reason: of an end before theirs, in one line; empty: the run is over, or all of them end by the same request to stop.
        code: the exit code that goes with it. The others end with it too.
    """
    global _watch, _started
    if _watch is not None:
        _watch.leave(f"{code} {reason}" if reason else "")
    _watch, _started = None, False


def wait_for_report() -> None:
    """After an exchange has failed: give the watch time to report a lost process, which also ends this one."""
    if _watch is not None:
        time.sleep(GRACE_SECONDS + 2 * SAME_MACHINE_SECONDS + 1)
