"""A run that goes on from a checkpoint ends as one that was never stopped: to the bit where kernels are deterministic."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu import small_runs

SETTINGS = {"save_steps": 2, "save_total_limit": 9, "dtype": "bfloat16"}
CLOSE = 0.05
"""Of the largest weight: how far two runs of the same settings may end apart where kernels add up in any order."""


def resumed(stage, model, tmp_path):
    """The folders of a whole run, and of a copy that went on from its first checkpoint."""
    run, more = getattr(small_runs, stage), dict(SETTINGS)
    if stage == "ppo":
        more |= {
            "total_updates": 4,
            "num_ppo_epochs": 2,
            "num_mini_batches": 2,
            "reward_functions": ["align.ppo.toy_rewards:share_of_e"],
        }
    else:
        more |= {"batch_size": 8, "save_steps": 1}
    whole, again = tmp_path / "whole", tmp_path / "again"
    run(model, whole, **more)
    saved = sorted(whole.glob("checkpoints/update-*"), key=lambda path: int(path.name.removeprefix("update-")))
    assert len(saved) >= 2
    shutil.copytree(whole, again)
    shutil.rmtree(again / "model")
    for folder in saved[1:]:
        shutil.rmtree(again / "checkpoints" / folder.name)
    run(model, again, **more | {"resume_from_checkpoint": True})
    return whole, again


def largest_difference(whole, again):
    """Over all weights, as a share of the largest."""
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (again, whole))
    assert ours.keys() == theirs.keys()
    gaps = [float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours]
    return max(gaps) / max(float(weight.float().abs().max()) for weight in theirs.values())


def losses(folder):
    return [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow  # tests/training/test_resume.py resumes on a processor
@pytest.mark.parametrize("stage", ["sft", "ppo"])
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("smollm2-135m", marks=pytest.mark.gpu)])
def test_deterministic_kernels_give_the_same_bits(stage, model, device, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # cumsum warns on a GPU, of short rows too
    try:
        whole, again = resumed(stage, model, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert largest_difference(whole, again) == 0
    assert losses(again) == losses(whole)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_what_differs_without_them(stage, tmp_path, record_property):
    difference = largest_difference(*resumed(stage, "smollm2-135m", tmp_path))
    record_property("largest_difference", difference)
    assert difference <= CLOSE
