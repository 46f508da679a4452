"""How the threads that compute an operation on a processor wait for each other."""

import os

SPIN_COUNT = 10_000
"""Rounds that a thread waits awake for the others before it sleeps. GNU's OpenMP takes 300,000 (libgomp's manual,
GOMP_SPINCOUNT), so that one busy program beside a run takes a core whose thread all others wait for, awake: an update of the
demo's reward model on two cores took 14 to 35 seconds instead of 3.2. With 10,000 it takes 9, and 3.2 alone; with 1,000 5,
and 4.4 alone."""


def share_cores() -> None:
    """Let threads that wait give way to other programs soon; read once, when torch is imported. The user's word counts."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
