import contextlib
import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from align import cli
from tests.bad_input.conftest import TINY, snapshot


@dataclass
class Disk:
    """A place where files stop growing, until `enlarge` is called."""

    folder: Path
    enlarge: Callable[[], None]


def mounted(size):
    """Try a small file system in memory; containers often forbid it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        return done.returncode == 0 and subprocess.run(["umount", folder]).returncode == 0


# The limit on a file's size works everywhere and gives "File too large"; a full file system is the real thing.
KINDS = ["file size"] + (["file system"] if shutil.which("mount") and mounted("64k") else [])


@pytest.fixture(params=KINDS)
def small_disk(request, tmp_path):
    """`small_disk(kilobytes)`: writing beyond that fails as it does on a full disk."""
    undo = contextlib.ExitStack()

    def make(kilobytes):
        folder = tmp_path / "disk"
        folder.mkdir()
        if request.param == "file system":
            mount = ["mount", "-t", "tmpfs", "-o"]
            subprocess.run([*mount, f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
            undo.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)
            return Disk(folder, lambda: subprocess.run([*mount, "remount,size=64m", str(folder)], check=True) and None)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, old)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, old[1]))
        return Disk(folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old))

    with undo:
        yield make


# tiny-gpt2 in bfloat16 has 300 kB: 120 kB are less than the model, 600 kB less than a checkpoint with Adam's moments.
@pytest.mark.parametrize("kilobytes", [120, 600])
def test_a_full_disk(kilobytes, small_disk, finished, command_error):
    """The line names what was being written; no file is cut off; with room again, a resumed run ends as a whole one."""
    disk = small_disk(kilobytes)
    run = disk.folder / "run"
    data = str(finished.parent / "demos.jsonl")
    words = ["sft", *TINY, "--train_data", data, "--num_train_epochs", "2", "--save_steps", "1", "--output_dir", str(run)]
    line = command_error(cli.main, words).splitlines()[-1]
    place = run / ("model" if kilobytes == 120 else "checkpoints/update-000001")
    assert line.startswith(f"error: {place}: cannot be written (")
    assert line.endswith("the old contents are unchanged")
    left = snapshot(run)
    assert not place.exists()
    assert {name for name in left if "/." in name or name.startswith(".")} == {".lock"}, "temporary files were left"
    for name in left:
        if name.endswith(".jsonl"):
            assert all(json.loads(row) for row in left[name].decode().splitlines())
        if name.endswith(".safetensors"):
            assert load_file(run / name)
    disk.enlarge()
    cli.main([*words, "--resume_from_checkpoint"])
    ours, theirs = load_file(run / "model" / "model.safetensors"), load_file(finished / "model" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_disk_that_fills_up_under_the_metrics(small_disk, finished, command_error):
    """With TensorBoard too, whose writer works in a thread: the lines that are there are whole."""
    disk = small_disk(40)
    data = str(finished.parent / "demos.jsonl")
    # No model fits 40 kB, so the run must end before its first one: it is at the end of an epoch of 4 updates.
    words = ["sft", "--model", "tiny-gpt2", "--train_data", data, "--batch_size", "1", "--eval_steps", "1000000"]
    words += ["--num_train_epochs", "2000", "--output_dir", str(disk.folder / "run")]
    line = command_error(cli.main, words).splitlines()[-1]
    assert line.startswith("error: ")
    assert str(disk.folder / "run") in line
    rows = (disk.folder / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [json.loads(row)["update"] for row in rows]
    assert updates == list(range(updates[0], updates[0] + len(rows)))
    assert len(rows) > 20
