"""A stand-in server in a process of its own, which may kill itself in the middle of its work.

Usage: served.py FOLDER PORT [COMPLETIONS]: after so many completions, the process dies by SIGKILL.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("stand_in")))

from vllm.server import Server

folder, port, *limit = sys.argv[1:]
server = Server(folder, int(port))
complete = server.complete


def complete_or_die(body: dict) -> dict:
    if limit and len(server.requests) >= int(limit[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return complete(body)


server.complete = complete_or_die
while True:
    time.sleep(3600)
