"""The app in a spawned process, as `align annotate` starts it. A forked one sometimes answered no request."""

import multiprocessing
import os
import tempfile

_PROCESSES = multiprocessing.get_context("spawn")


def start_app(words, folder, environment, setup=None):
    """Start `align annotate WORDS` with quick password hashes in a folder; what it prints goes to the file `log` there.

    `setup` is called in the process first.
    """
    process = _PROCESSES.Process(target=_run, args=(words, folder, environment, setup), daemon=True)
    process.start()
    return process


def _run(words, folder, environment, setup):
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # else the folder of the process that started this one
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from annotation_ui.cli import main

    use_quick_hashes()
    if setup:
        setup()
    raise SystemExit(main(words))


def use_quick_hashes():
    """Hash with argon2's least memory and time from now on: what is tested is never how hard a hash is to break."""
    from argon2 import PasswordHasher

    from annotation_ui.server import auth

    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    auth._HASHER, auth._UNKNOWN_USER_HASH = hasher, hasher.hash("nobody")
