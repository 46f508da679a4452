import gc
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.models.loading import load
from align.ppo import PPOConfig, PPOTrainer
from align.ppo.toy_rewards import share_of_e
from align.sft import SFTConfig
from align.sft.train import SFTTrainer
from align.training.run_folder import read_metrics
from tests.files import ROOT
from tests.gpu import small_runs
from tests.gpu.small_runs import COMMON, PPO, all_stages
from tests.ports import free_port

BFLOAT16_RATIO = 5e-3
"""Mean |ratio - 1| at the first minibatch in bfloat16: the passes with and without gradients may use different kernels."""
GPU = pytest.mark.gpu


@pytest.mark.parametrize(
    ("where", "model"),
    [
        pytest.param("cpu", "tiny-llama", marks=pytest.mark.slow),
        *(pytest.param("cuda", model, marks=GPU) for model in ("tiny-llama", "tiny-gpt2", "tiny-t5", "smollm2-135m")),
    ],
)
@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), {"lora_r": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=GPU), "bfloat16"])
def test_every_stage_runs(where, model, settings, dtype, tmp_path, record_property):
    on_gpu = torch.cuda.is_available()  # the stages take a GPU wherever there is one
    assert on_gpu or where == "cpu", "these tests were asked for, but torch sees no GPU"
    metrics = all_stages(model, tmp_path, settings | {"dtype": dtype})
    for stage, rows in metrics.items():
        assert len(rows) >= 2, stage
        assert all(math.isfinite(value) for row in rows for value in row.values()), stage
    error = max(row["ratio/abs_error"] for row in metrics["ppo"])
    record_property("ratio/abs_error", error)
    record_property("tokens_per_second", metrics["ppo"][-1]["speed/tokens_per_second"])
    # One epoch of one minibatch: every step of learning is the first of a fresh rollout.
    assert error <= (BFLOAT16_RATIO if on_gpu and dtype == "bfloat16" else 1e-4)
    loaded = load(ModelConfig(model=str(tmp_path / "ppo" / "model"), dtype=dtype), getattr(torch, dtype))
    assert all(torch.isfinite(weight).all() for weight in loaded.backbone.parameters())


SETTINGS = {"dtype": "float32"}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The metrics of each stage without DeepSpeed."""
    return all_stages("tiny-llama", tmp_path_factory.mktemp("without"), SETTINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("zero", ["zero1", "zero2", "zero3", "zero3 layers", "zero3-offload"])
def test_it_learns_the_same(zero, without, tmp_path):
    zero, *layers = zero.split()
    launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{zero}.yaml"]
    launcher += ["--num_processes", "1", "--main_process_port", str(free_port())]
    script = ["tests/gpu/small_runs.py", "tiny-llama", str(tmp_path), json.dumps(SETTINGS), *layers]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, *launcher, *script]
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for stage in ("sft", "reward", "dpo"):
        ours, theirs = (
            [row["loss"] for row in rows if "loss" in row] for rows in (read_metrics(tmp_path / stage), without[stage])
        )
        assert len(theirs) >= 2
        assert ours == pytest.approx(theirs, rel=1e-3)
    ours, theirs = (rows[0]["entropy"] for rows in (read_metrics(tmp_path / "ppo"), without["ppo"]))
    assert ours == pytest.approx(theirs, rel=1e-3), "the responses of the first rollout come from the same policy"
    assert bool(layers) == ("weights gathered layer by layer" in done.stderr)
    assert (tmp_path / "ppo" / "model" / "model.safetensors").exists()


TOLERANCE = 0.15
LARGE = {"micro_batch_tokens": 8192, "max_prompt_tokens": 256}
"""Micro-batches so large that activations count, not weights alone."""


def trainer(stage, settings, folder):
    common = COMMON | LARGE | settings | {"model": "smollm2-135m", "dtype": "bfloat16", "output_dir": str(folder)}
    if stage == "sft":
        data = "data/demonstrations.jsonl"
        config = SFTConfig(**common | {"train_data": data, "batch_size": 128, "max_response_tokens": 256})
        return SFTTrainer(config.model, config.train_data, config)
    config = PPOConfig(**common | PPO | {"rollout_batch_size": 64, "max_new_tokens": 128})
    return PPOTrainer(config.model, [share_of_e], config.prompts, config)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sft", "ppo"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_r": 16}, {"gradient_checkpointing": True}, {"optimizer": "adafactor"}],
    ids=["full", "lora", "checkpointing", "adafactor"],
)
def test_the_estimate(stage, settings, tmp_path, record_property):
    gc.collect()
    torch.cuda.empty_cache()
    made = trainer(stage, settings, tmp_path)
    made.train()
    memory = made.run.memory
    record_property("estimate", memory.expected_bytes)
    record_property("peak", memory.peak())
    assert memory.peak() == pytest.approx(memory.expected_bytes, rel=TOLERANCE)


REWARD = "align.ppo.toy_rewards:share_of_e"
RESUMED = {"save_steps": 2, "save_total_limit": 9, "dtype": "bfloat16"}
CLOSE = 0.05
"""Of the largest weight: how far two runs of the same settings may end apart where kernels add up in any order."""


def resumed(stage, model, tmp_path):
    """The folders of a whole run, and of a copy that went on from its first checkpoint."""
    run, more = getattr(small_runs, stage), dict(RESUMED)
    if stage == "ppo":
        more |= {"total_updates": 4, "num_ppo_epochs": 2, "num_mini_batches": 2, "reward_functions": [REWARD]}
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
    assert [row.get("loss") for row in read_metrics(again)] == [row.get("loss") for row in read_metrics(whole)]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_what_differs_without_them(stage, tmp_path, record_property):
    difference = largest_difference(*resumed(stage, "smollm2-135m", tmp_path))
    record_property("largest_difference", difference)
    assert difference <= CLOSE


@pytest.mark.gpu
def test_a_micro_batch_that_does_not_fit_is_one_line(tmp_path):
    """The largest micro-batch runs before the first update: a run that does not fit ends there."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 3 * 2**30) / total)
    settings = LARGE | {"train_data": "data/demonstrations.jsonl", "batch_size": 256, "max_response_tokens": 256}
    settings |= {"micro_batch_tokens": 32768, "dtype": "float32"}
    try:
        with pytest.raises(UserError, match=r"the largest micro-batch .* lower micro_batch_tokens to 16384"):
            small_runs.sft("smollm2-135m", tmp_path, **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not (tmp_path / "model").exists()
    small_runs.sft("tiny-llama", tmp_path / "next")  # the GPU is usable afterwards


@pytest.mark.slow  # tests/sft/test_loss.py has the processor's
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_a_loss_that_is_no_number_ends_the_run(stage, device, tmp_path):
    with pytest.raises(UserError, match=r"update \d: the (loss|gradient) is not a finite number"):
        getattr(small_runs, stage)("tiny-llama", tmp_path, learning_rate=1e30, batch_size=4)
