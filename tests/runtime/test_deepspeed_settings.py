import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from align.core.errors import UserError
from align.runtime.deepspeed_settings import APPLIED, INSTEAD, complete_settings, run_settings
from align.runtime.distributed import make_accelerator

AUTO = "auto"
TRAINER_FILE = {
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
        "stage3_gather_16bit_weights_on_model_save": AUTO,
        "offload_optimizer": {"device": "cpu"},
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": True,
}
"""The file of transformers' documentation for ZeRO-3."""


def contains_auto(value):
    return value == AUTO or (isinstance(value, dict) and any(map(contains_auto, value.values())))


def test_a_file_for_the_trainer_of_transformers_is_filled_in():
    found, line = complete_settings(TRAINER_FILE, torch.bfloat16, 0.5, "ds.json")
    assert not contains_auto(found)
    assert "optimizer" not in found
    assert "scheduler" not in found
    assert found["gradient_clipping"] == 0.5
    assert found["bf16"] == {"enabled": True}
    zero = found["zero_optimization"]
    assert zero["sub_group_size"] == 1e9
    assert zero["offload_optimizer"] == {"pin_memory": True, "device": "cpu"}
    assert zero["stage3_gather_16bit_weights_on_model_save"], "otherwise the trained model cannot be saved"
    assert found["wall_clock_breakdown"]
    for key, setting in (("optimizer", "learning_rate"), ("scheduler", "lr_scheduler_type")):
        assert key in line
        assert setting in line
    assert "train_batch_size" not in line, "auto asks for nothing"


values = st.one_of(
    st.booleans(), st.integers(0, 9), st.just(AUTO), st.dictionaries(st.sampled_from("ab"), st.integers(1, 2))
)
EXTRA = ("compression_training", "data_efficiency", "sparse_attention", "gradient_allreduce_op", "amp", "no_such_key")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*INSTEAD, *sorted(APPLIED - {"zero_optimization"}), *EXTRA]), values))
def test_each_key_is_applied_overridden_with_a_line_or_refused(stored):
    stored |= {"zero_optimization": {"stage": 2}}
    refused = [key for key in EXTRA if stored.get(key, AUTO) != AUTO and stored[key]]
    if refused:
        with pytest.raises(UserError, match="|".join(refused)):
            complete_settings(stored, torch.float32, 1.0, "ds.json")
        return
    found, line = complete_settings(stored, torch.float32, 1.0, "ds.json")
    own = run_settings(torch.float32, 1.0)
    assert {key: found[key] for key in own} == own, "the run decides these"
    for key, value in stored.items():
        is_auto_or_off = contains_auto(value) or not value
        if key in EXTRA:
            assert is_auto_or_off, key
        elif key in APPLIED:
            assert is_auto_or_off or found[key] == value, key
        elif not is_auto_or_off and value != own.get(key):
            assert key in line, key


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "no_such_key": 1}}, "no_such_key"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 2}, "compression_training": {"enabled": True}}, "compression_training"),
    ],
)
def test_a_key_that_changes_results_or_that_does_not_exist_is_refused(stored, named):
    with pytest.raises(UserError, match=named):
        complete_settings(stored, torch.float32, 1.0, "ds.json")


@pytest.mark.parametrize("content", ["{", "[1]", None])
def test_a_file_that_cannot_be_read_is_named(content, tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    with pytest.raises(UserError, match=r"ds\.json"):
        make_accelerator(torch.float32, 1.0)
