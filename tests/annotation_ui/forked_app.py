"""The app in processes that share its imports: they are most of what a start costs, and tests start it dozens of times.

Each is forked from a clean process that has done nothing else, and has an environment, a folder and a log of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path

from .quick_hashes import use_quick_hashes

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["annotation_ui.cli", "uvicorn.protocols.http.auto", "annotation_ui.app", __name__])


def start_app(words: list[str], folder: Path, environment: dict[str, str]) -> BaseProcess:
    """Start `align annotate WORDS` with quick password hashes in a folder; what it prints goes to the file `log` there."""
    process = _FORKS.Process(target=_run, args=(words, folder, environment), daemon=True)
    process.start()
    return process


def _run(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    from annotation_ui.cli import main

    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # else the folder of the process that was forked
    for name, module in list(sys.modules.items()):
        if name.startswith("gradio.") and "DEFAULT_TEMP_DIR" in vars(module):  # Gradio names it when it is imported
            module.DEFAULT_TEMP_DIR = str(Path(tempfile.gettempdir()) / "gradio")  # type: ignore[attr-defined]
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    use_quick_hashes()
    raise SystemExit(main(words))
