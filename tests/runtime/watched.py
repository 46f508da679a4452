"""One process of three that watch each other; see test_heartbeat.py.

Usage: watched.py RANK PORT: the first one makes the store, on PORT; each prints `watching` and its process id. Then it obeys
a line on its stdin: the seconds that it still runs after it has told the others its exit code and its reason, or `exchange`.
"""

import sys
import time

from torch.distributed import TCPStore

from align.core import heartbeat

heartbeat.GRACE_SECONDS, heartbeat.BEAT_SECONDS = 0.3, 0.1
heartbeat.LOST_AFTER, heartbeat.LOST_AFTER_ERROR = 4.0, 1.0
rank, port = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, 3, is_master=rank == 0, wait_for_workers=True)


def wait_for_everyone() -> None:
    store.add("arrived", 1)
    while store.add("arrived", 0) < 3:
        time.sleep(0.05)


heartbeat.start_watching(store, rank, 3, wait_for_everyone)
print("watching", flush=True)
for line in sys.stdin:
    if line.strip() == "exchange":
        heartbeat.wait_for_report()
        continue
    seconds, _, end = line.strip().partition(" ")
    code, _, reason = end.partition(" ")
    heartbeat.stop_watching(reason, int(code or 0))
    time.sleep(float(seconds))
    break
