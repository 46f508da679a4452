"""Every stage runs on the device, and what it saves loads on a processor."""

import math

import pytest
import torch

from align.core.settings import ModelConfig
from align.models.loading import load
from tests.gpu.small_runs import all_stages

BFLOAT16_RATIO = 5e-3
"""Mean |ratio - 1| at the first minibatch in bfloat16: the passes with and without gradients may use different kernels."""
GPU = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "model"),
    [
        ("cpu", "tiny-llama"),
        *(pytest.param("cuda", model, marks=GPU) for model in ("tiny-llama", "tiny-gpt2", "tiny-t5", "smollm2-135m")),
    ],
)
@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.full), {"lora_rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=GPU), "bfloat16"])
def test_every_stage_runs(where, model, settings, dtype, tmp_path, record_property):
    on_gpu = torch.cuda.is_available()  # the stages take a GPU wherever there is one
    assert on_gpu or where == "cpu", "these tests were asked for, but torch sees no GPU"
    metrics = all_stages(model, tmp_path, settings | {"dtype": dtype})
    for stage, rows in metrics.items():
        assert len(rows) >= 2, stage
        assert all(math.isfinite(value) for row in rows for value in row.values()), stage
    error = max(row["ratio_error"] for row in metrics["ppo"])
    record_property("ratio_error", error)
    record_property("tokens_per_second", metrics["ppo"][-1]["speed/tokens"])
    # One epoch of one minibatch: every step of learning is the first of a fresh rollout.
    assert error <= (BFLOAT16_RATIO if on_gpu and dtype == "bfloat16" else 1e-4)
    loaded = load(ModelConfig(model=str(tmp_path / "ppo" / "model"), dtype=dtype), getattr(torch, dtype))
    assert all(torch.isfinite(weight).all() for weight in loaded.backbone.parameters())
