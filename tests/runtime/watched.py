"""One process of several that watch each other; see test_liveness.py.

Usage: watched.py RANK [PORT TOKEN]: the first one prints its port and its token; then each obeys a line
on its stdin: the seconds that it still runs after it has told the others its exit code and its reason.
"""

import sys
import time

from align.core import liveness

liveness.GRACE_SECONDS = 0.3
rank = int(sys.argv[1])
if rank:
    liveness.connect(rank, "127.0.0.1", liveness.Listener(int(sys.argv[2]), sys.argv[3]), 5.0)
else:
    sys.stdout.write(" ".join(map(str, liveness.start_listening(5.0))) + "\n")
sys.stdout.write("watching\n")
sys.stdout.flush()
for line in sys.stdin:
    seconds, _, end = line.strip().partition(" ")
    code, _, reason = end.partition(" ")
    liveness.stop_watching(reason, int(code or 0))
    time.sleep(float(seconds))
    break
