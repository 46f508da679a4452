"""A limit on the requests of each token in this process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

REQUESTS, PER_SECONDS = 120, 60.0  # requests of one token at once, and the time in which as many become allowed again


@dataclass
class RateLimit:
    """A token bucket per key: `requests` at once, refilled evenly over `seconds`."""

    requests: int = REQUESTS
    seconds: float = PER_SECONDS
    clock: Callable[[], float] = time.monotonic
    _buckets: dict[int, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, key: int) -> int:
        """Take a request of a key; returns 0, or the whole seconds until the next one is allowed."""
        rate = self.requests / self.seconds
        with self._lock:
            now = self.clock()
            left, since = self._buckets.get(key, (float(self.requests), now))
            left = min(float(self.requests), left + (now - since) * rate)
            allowed = left >= 1
            self._buckets[key] = (left - allowed, now)
            return 0 if allowed else math.ceil((1 - left) / rate)
