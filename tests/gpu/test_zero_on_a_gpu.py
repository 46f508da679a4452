"""DeepSpeed's ZeRO with one process on one GPU: the stages end as they do without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.training.run_folder import read_metrics
from tests.gpu.small_runs import all_stages
from tests.launch.launcher import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SETTINGS = {"dtype": "float32"}
COMPARED = {"sft": "loss", "reward": "loss", "dpo": "loss"}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The metrics of each stage without DeepSpeed."""
    return all_stages("tiny-llama", tmp_path_factory.mktemp("without"), SETTINGS)


@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_it_learns_the_same(zero, without, tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{zero}.yaml"]
    launcher += ["--num_processes", "1", "--main_process_port", str(free_port())]
    script = ["tests/gpu/small_runs.py", "tiny-llama", str(tmp_path), json.dumps(SETTINGS)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, *launcher, *script]
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for stage, name in COMPARED.items():
        theirs = [row[name] for row in without[stage] if name in row]
        assert len(theirs) >= 2
        assert [row[name] for row in read_metrics(tmp_path / stage) if name in row] == pytest.approx(theirs, rel=1e-3)
    assert (tmp_path / "ppo" / "model" / "model.safetensors").exists()
