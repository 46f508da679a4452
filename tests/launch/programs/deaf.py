"""A process that no request to stop ends. Usage: deaf.py FOLDER: each writes a file there when it has begun."""

import os
import signal
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
(Path(sys.argv[1]) / os.environ["RANK"]).touch()
time.sleep(120)
