"""The app in a process of its own, as `align annotate` starts it, with an environment, a folder and a log of its own.

Not forked from a process that has imported it: now and then such an app answered no request any more.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

_PROCESSES = multiprocessing.get_context("spawn")


def start_app(words: list[str], folder: Path, environment: dict[str, str]) -> BaseProcess:
    """Start `align annotate WORDS` with quick password hashes in a folder; what it prints goes to the file `log` there."""
    process = _PROCESSES.Process(target=_run, args=(words, folder, environment), daemon=True)
    process.start()
    return process


def _run(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # else the folder of the process that started this one
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from annotation_ui.cli import main

    from .quick_hashes import use_quick_hashes

    use_quick_hashes()
    raise SystemExit(main(words))
