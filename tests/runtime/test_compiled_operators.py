"""Operators are compiled by one process at a time, and one that was killed while it compiled blocks no other."""

import os
import subprocess
import sys

import pytest
import torch.utils.cpp_extension as torch_extensions

from align.runtime.distributed import prepare_compiling

HOLD = """
import sys, time
from align.runtime.distributed import OperatorLock
OperatorLock(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""
TAKE = """
import sys
from align.runtime.distributed import OperatorLock
lock = OperatorLock(sys.argv[1], warn_after_seconds=1.0)
print("asked", flush=True)
lock.try_acquire()
print("taken", flush=True)
"""


def started(script, path):
    program = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)


def test_a_lock_is_waited_for_and_ends_with_its_process(tmp_path):
    holder = started(HOLD, tmp_path / "lock")
    assert holder.stdout.readline() == "held\n"
    other = started(TAKE, tmp_path / "lock")
    assert other.stdout.readline() == "asked\n"
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    holder.kill()
    assert other.communicate(timeout=60)[0] == "taken\n"
    holder.communicate()


def test_torch_compiles_where_a_killed_process_left_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_extensions, "FileBaton", torch_extensions.FileBaton)  # put back afterwards
    monkeypatch.setenv("PATH", os.environ["PATH"])
    (tmp_path / "one.cpp").write_text("int one() { return 1; }")
    (tmp_path / "lock").touch()  # torch itself would wait for its removal
    prepare_compiling()
    torch_extensions.load("one", str(tmp_path / "one.cpp"), build_directory=str(tmp_path), is_python_module=False)
    assert (tmp_path / "one.so").exists()
