"""Names the process that a run has lost: it was killed, it hangs, or its machine is down or unreachable.

gloo and NCCL report the address of a process that has died, not its rank, and wait for one that hangs until
`collective_timeout`. Here each process writes a heartbeat into torch's store. The first process reads those of all others,
and they read its own. Each then prints which process is lost and ends with exit code 76, or with the code of a process that
could still report its error.
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
"""Exit code of a run that lost a process, or waited in vain for one: EX_PROTOCOL of sysexits.h."""
GRACE_SECONDS = 5.0
"""From the loss of a process to the end of the others. A launcher ends the processes of its machine sooner, and their
errors are printed first."""
BEAT_SECONDS = 1.0
LOST_AFTER = 45.0
"""Seconds without a heartbeat after which a process counts as lost."""
LOST_AFTER_ERROR = 8.0
"""The same, after an exchange has failed."""
TELL_SECONDS = 5.0
"""How long a process that ends waits for the store, which has gone or hangs with its process."""
LEFT, VERDICT, HEARD = b"left", "verdict", "heard"
"""The last heartbeat of a process that ends in order, the key of the first loss or error, and keys of who has read it."""


class Watch:
    """This process's part of the watch, with a connection to the store that no other thread uses."""

    def __init__(self, store: "Store", rank: int, processes: int) -> None:
        self.store, self.rank, self.processes, self.lost_after = store, rank, processes, LOST_AFTER
        self.watched = range(1, processes) if rank == 0 else range(1)
        self.finished = threading.Event()
        self.exchanging: threading.Thread | None = None
        self.staying: threading.Thread | None = None
        """Waits for the others to read why this process, the first, ends."""
        self.verdict = ""
        """An exit code and the processes that are lost."""
        self.beats: dict[int, bytes] = {}
        self.seen: dict[int, float] = {}
        self.answered = time.monotonic()
        """When the store last answered. Of all processes but the first, which may hold it, only its answers tell a loss."""
        self._beat(0)

    def start(self) -> None:
        """Begin to watch; all processes must have made their `Watch`."""
        self.seen = dict.fromkeys(range(self.processes), time.monotonic())
        self._read_beats()
        self.exchanging = threading.Thread(target=self._exchange, daemon=True)
        self.exchanging.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def leave(self, reason: str, code: int) -> None:
        """Tell the others that this process ends, in order without a `reason`; from now on no loss ends it."""
        self.finished.set()
        telling = threading.Thread(target=self._tell, args=(reason, code), daemon=True)
        telling.start()
        telling.join(TELL_SECONDS)

    def _tell(self, reason: str, code: int) -> None:
        if self.exchanging:
            self.exchanging.join()  # a heartbeat that is being written would replace `LEFT`
        with suppress(RuntimeError):  # the store has gone with its process
            if not reason:
                self.store.set(str(self.rank), LEFT.decode())
                return
            self.store.compare_set(VERDICT, "", f"{code} process {self.rank} ({socket.gethostname()}: exited: {reason})")
            if self.rank == 0:
                # This process may hold the store, which the others have yet to read. Meanwhile it prints its error: a
                # launcher that sees another process end will end this one.
                self.staying = threading.Thread(target=self._wait_until_heard, daemon=False)
                self.staying.start()

    def _wait_until_heard(self) -> None:
        """Wait until the others have read the verdict; without it they would take this process for lost."""
        deadline, others = time.monotonic() + LOST_AFTER_ERROR, [f"{HEARD} {rank}" for rank in range(1, self.processes)]
        with suppress(RuntimeError):
            while time.monotonic() < deadline and not self.store.check(others):
                time.sleep(BEAT_SECONDS / 10)

    def watch_all(self) -> None:
        """Watch all other processes with less patience: an exchange has failed, and the first process may not know it."""
        self.lost_after = min(self.lost_after, LOST_AFTER_ERROR)
        self.seen |= dict.fromkeys(set(range(self.processes)) - set(self.watched), time.monotonic())  # not read until now
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
        """Write heartbeats and read those of others; an exchange with the store may wait for ever."""
        count = 0
        while not self.finished.wait(BEAT_SECONDS):
            count += 1
            with suppress(RuntimeError):  # the store has gone: its process sends no heartbeat either
                self._beat(count)
                self._read_beats()
                if self.verdict or self.store.check([VERDICT]):
                    self.verdict = self.store.compare_set(VERDICT, "", self.verdict).decode(errors="replace")
                    self.store.set(f"{HEARD} {self.rank}", "")

    def _judge(self) -> None:
        before = time.monotonic()
        while not self.finished.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            if now - before > 2 * BEAT_SECONDS:  # this process was suspended itself, perhaps with all others
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
        """Print which process is lost, and end this one: it may wait for that one in a call that nothing interrupts."""
        code, _, names = self.verdict.partition(" ")
        if not self.finished.is_set():
            prefix = f"[process {self.rank}] " if self.rank else ""
            advice = "resume from the latest checkpoint with --resume_from_checkpoint auto"
            print(f"{prefix}error: lost {names}; {advice}", file=sys.stderr, flush=True)
            os._exit(int(code))


_watch: Watch | None = None
_started = 0


def start_watching(store: "Store", rank: int, processes: int, wait_for_everyone: Callable[[], None]) -> None:
    """Begin to watch the other processes, unless this process does so already. `wait_for_everyone` is a barrier of all."""
    from torch.distributed import PrefixStore

    global _watch, _started
    if _watch is None:
        _started += 1  # a process may watch several runs one after another
        own = store.clone()  # type: ignore[attr-defined]  # which torch's stubs lack
        _watch = Watch(PrefixStore(f"alive-{_started}", own), rank, processes)
        wait_for_everyone()
        _watch.start()


def stop_watching(reason: str = "", code: int = 1) -> threading.Thread | None:
    """Tell the others that this process ends, and stop watching them.

    A `reason` is that of an end before theirs; they end with its `code` too. Return a thread that waits until they have read
    it, before which the store must not be closed.
    """
    global _watch
    left, _watch = _watch, None
    if left is None:
        return None
    left.leave(reason, code)
    return left.staying


def wait_for_report() -> None:
    """After an exchange has failed: give the watch time to name the lost process, which also ends this one."""
    if _watch is not None:
        _watch.watch_all()
        time.sleep(LOST_AFTER_ERROR + GRACE_SECONDS + 3 * BEAT_SECONDS)
