"""Two runs in one folder: the second is refused, whoever the first is; a dead process holds nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.training.run_folder import refuse_other_run, release_lock, take_lock

ROOT = Path(__file__).parents[2]


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder until its input ends."""
    code = "import sys, pathlib; from align.training.run_folder import take_lock; take_lock(pathlib.Path(sys.argv[1]))\n"
    code += "print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_that_another_process_holds(holder, tmp_path):
    for refuse in (refuse_other_run, take_lock):
        with pytest.raises(UserError, match=f"process {holder.pid} on .* is writing a run there"):
            refuse(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    refuse_other_run(tmp_path)
    take_lock(tmp_path)
    release_lock(tmp_path)


def test_a_process_may_take_its_own_folder_again_and_gives_it_up(tmp_path):
    take_lock(tmp_path)
    take_lock(tmp_path)
    refuse_other_run(tmp_path)
    words = [
        sys.executable,
        "-c",
        "import sys, pathlib; from align.training.run_folder import take_lock as t; t(pathlib.Path('.'))",
    ]
    refused = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert f"process {os.getpid()} on" in refused.stderr
    release_lock(tmp_path)
    assert subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


def test_looking_writes_nothing(tmp_path):
    refuse_other_run(tmp_path)
    assert not list(tmp_path.iterdir())
