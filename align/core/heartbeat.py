"""Heartbeats between the processes of a run, to detect and name a process that was killed, hangs or is unreachable.

gloo and NCCL report the address of a dead process, not its rank, and wait for a hanging process until
`collective_timeout`. Here each process writes a heartbeat into torch's store. The first process reads the heartbeats of all
others, and the others read the first one's. Each process then prints the lost rank and exits with code 76, or with the code
of a process that could still report its error.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

EXIT_LOST = 76
"""Exit code of a run that lost a process (EX_PROTOCOL of sysexits.h)."""
GRACE_SECONDS = 5.0
"""Seconds from the loss of a process to the exit of the others. A launcher stops the processes of its machine sooner, so
their errors are printed first.
"""
BEAT_SECONDS = 1.0
LOST_AFTER = 45.0
"""Seconds without a heartbeat until a process is considered lost."""
LOST_AFTER_ERROR = 8.0
"""The same, after communication has failed."""
TELL_SECONDS = 5.0
"""Seconds that an exiting process waits for the store, which may be gone or hang."""
LEFT, VERDICT, HEARD = b"left", "verdict", "heard"
"""Last heartbeat of a process that exits normally, key of the first loss or error, and keys that mark it as read."""


class Watch:
    """Heartbeat of this process, and monitoring of the others. Uses a separate connection to the store."""

    def __init__(self, store: "Store", rank: int, processes: int) -> None:
        self.store, self.rank, self.processes, self.lost_after = store, rank, processes, LOST_AFTER
        self.watched = range(1, processes) if rank == 0 else range(1)
        self.finished = threading.Event()
        self.exchanging: threading.Thread | None = None
        self.staying: threading.Thread | None = None
        """Thread of the first process that waits until the others have read why it exits."""
        self.verdict = ""
        """Exit code and lost processes."""
        self.beats: dict[int, bytes] = {}
        self.seen: dict[int, float] = {}
        self.answered = time.monotonic()
        """Time of the store's last response. The first process may host it, so the others are judged by this clock."""
        self._beat(0)

    def start(self) -> None:
        """Start monitoring. All processes must have created their `Watch`."""
        self.seen = dict.fromkeys(range(self.processes), time.monotonic())
        self._read_beats()
        self.exchanging = threading.Thread(target=self._exchange, daemon=True)
        self.exchanging.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def leave(self, reason: str, code: int) -> None:
        """Announce that this process exits, normally if `reason` is empty. From now on, losing another process does not end
        it.
        """
        self.finished.set()
        telling = threading.Thread(target=self._tell, args=(reason, code), daemon=True)
        telling.start()
        telling.join(TELL_SECONDS)

    def _tell(self, reason: str, code: int) -> None:
        if self.exchanging:
            self.exchanging.join()  # a pending heartbeat would overwrite `LEFT`
        with suppress(RuntimeError):  # the store is gone with its process
            if not reason:
                self.store.set(str(self.rank), LEFT.decode())
                return
            self.store.compare_set(VERDICT, "", f"{code} process {self.rank} ({socket.gethostname()}: exited: {reason})")
            if self.rank == 0:
                # This process may host the store, which the others still have to read. Meanwhile it prints its error: a
                # launcher that sees another process exit will kill this one.
                self.staying = threading.Thread(target=self._wait_until_heard, daemon=False)
                self.staying.start()

    def _wait_until_heard(self) -> None:
        """Wait until the others have read the verdict. Otherwise they would report this process as lost."""
        deadline, others = time.monotonic() + LOST_AFTER_ERROR, [f"{HEARD} {rank}" for rank in range(1, self.processes)]
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self.store.check(others):
                time.sleep(BEAT_SECONDS / 10)

    def watch_all(self) -> None:
        """Monitor all other processes with a shorter timeout, after communication has failed."""
        self.lost_after = min(self.lost_after, LOST_AFTER_ERROR)
        self.seen |= dict.fromkeys(
            set(range(self.processes)) - set(self.watched), time.monotonic()
        )  # not monitored until now
        self.watched = range(self.processes)

    def _beat(self, count: int) -> None:
        self.store.set(str(self.rank), f"{socket.gethostname()} {count}")

    def _read_beats(self) -> None:
        watched = self.watched
        for rank, beat in zip(watched, self.store.multi_get([str(rank) for rank in watched]), strict=True):
            if beat != self.beats.get(rank):
                self.beats[rank] = beat
                self.seen[rank] = float("inf") if beat == LEFT else time.monotonic()
        self.answered = time.monotonic()

    def _exchange(self) -> None:
        """Write heartbeats and read the others'. Calls to the store may block forever."""
        count = 0
        while not self.finished.wait(BEAT_SECONDS):
            count += 1
            with suppress(RuntimeError):  # the store is gone: its process sends no heartbeat either
                self._beat(count)
                self._read_beats()
                if self.verdict or self.store.check([VERDICT]):
                    self.verdict = self.store.compare_set(VERDICT, "", self.verdict).decode(errors="replace")
                    self.store.set(f"{HEARD} {self.rank}", "")

    def _judge(self) -> None:
        before = time.monotonic()
        while not self.finished.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            if now - before > 2 * BEAT_SECONDS:  # this process was suspended, perhaps with all others
                self.seen = {rank: seen + now - before for rank, seen in self.seen.items()}
            before = now
            lost = [r for r in self.watched if r != self.rank and self._silence(r, now) > self.lost_after]
            if lost and not self.verdict:
                self.verdict = f"{EXIT_LOST} {', '.join(map(self._describe, lost))}"
            if self.verdict:
                time.sleep(GRACE_SECONDS)
                self._end()
                return

    def _silence(self, rank: int, now: float) -> float:
        return (self.answered if rank else now) - self.seen[rank]

    def _describe(self, rank: int) -> str:
        host = self.beats.get(rank, b"?").split()[0].decode(errors="replace")
        return f"process {rank} ({host}: no heartbeat for {self.lost_after:g} s)"

    def _end(self) -> None:
        """Print which process is lost and exit. The main thread may be blocked in a call that cannot be interrupted."""
        code, _, names = self.verdict.partition(" ")
        if not self.finished.is_set():
            prefix = f"[process {self.rank}] " if self.rank else ""
            advice = "resume from the latest checkpoint with --resume_from_checkpoint auto"
            print(f"{prefix}error: lost {names}; {advice}", file=sys.stderr, flush=True)
            os._exit(int(code))


_watch: Watch | None = None
_started = 0


def start_watching(store: "Store", rank: int, processes: int, wait_for_everyone: Callable[[], None]) -> None:
    """Start monitoring the other processes, unless already started. `wait_for_everyone` is a barrier."""
    from torch.distributed import PrefixStore

    global _watch, _started
    if _watch is None:
        _started += 1  # a process may execute several runs in sequence
        connection = store.clone()  # type: ignore[attr-defined]  # which torch's stubs lack
        _watch = Watch(PrefixStore(f"alive-{_started}", connection), rank, processes)
        wait_for_everyone()
        _watch.start()


def stop_watching(reason: str = "", code: int = 1) -> threading.Thread | None:
    """Announce that this process exits, and stop monitoring the others.

    Pass a `reason` if this process exits before the others; they then exit with the same `code`. Return a thread that waits
    until they have read the reason. The store must not be closed before that.
    """
    global _watch
    left, _watch = _watch, None
    if left is None:
        return None
    left.leave(reason, code)
    return left.staying


def wait_for_report() -> None:
    """After failed communication, give the watch time to name the lost process. The watch also exits this process."""
    if _watch is not None:
        _watch.watch_all()
        time.sleep(LOST_AFTER_ERROR + GRACE_SECONDS + 3 * BEAT_SECONDS)
