"""`sequence_parallel` is refused in one line where it cannot be; how a run computes with it is in tests/launch."""

import pytest

from align.core.errors import UserError
from align.sft import SFTConfig
from align.training.start import share_sequences


@pytest.mark.parametrize(
    ("model", "size", "why"),
    [
        ("tiny-t5", 2, "only decoders share rows, and t5 is none"),
        ("tiny-llama", 2, "it must divide the number of processes, 1"),
    ],
)
def test_what_cannot_share_rows_is_refused(load_sharp, make_run, model, size, why):
    run = make_run(SFTConfig, "sft", model=model)
    with pytest.raises(UserError, match=rf"sequence_parallel is {size}: {why}; set it to 1"):
        share_sequences(run, load_sharp(model).backbone, size)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_attention_heads": 3}, "it must divide the model's 3 heads"),
        ({"num_key_value_heads": 1}, "of queries and 1 of keys"),
        ({"_attn_implementation": "eager"}, "its own, and exchanges nothing"),
        ({"sliding_window": 8}, "looks back over a window"),
    ],
)
def test_models_that_cannot(load_sharp, make_run, monkeypatch, changed, why):
    backbone, run = load_sharp("tiny-llama").backbone, make_run(SFTConfig, "sft", model="tiny-llama")
    monkeypatch.setattr(type(run.accelerator), "num_processes", 2)
    for name, value in changed.items():
        monkeypatch.setattr(backbone.model.config, name, value, raising=False)
    with pytest.raises(UserError, match=why):
        share_sequences(run, backbone, 2)


def test_one_process_for_each_row_changes_nothing(load_sharp, make_run):
    backbone = load_sharp("tiny-llama").backbone
    share_sequences(make_run(SFTConfig, "sft", model="tiny-llama"), backbone, 1)
    assert backbone.sequence is None


def test_the_setting_counts_processes():
    with pytest.raises(UserError, match="sequence_parallel is 0, but must be 1 or more"):
        SFTConfig(sequence_parallel=0)
