"""`sequence_parallel` is refused in one line where it cannot be; how a run computes with it is in tests/launch."""

from pathlib import Path

import pytest
import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import wrap
from align.runtime.sequence import SequenceGroup
from align.sft import SFTConfig
from align.training.start import share_sequences
from tests.forked import forked
from tests.models.architectures import make_model


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


def balance_of_experts(folder: Path, rank: int | None) -> None:
    """Write the balance of three rows, each expert's tokens, and the gradient of a loss with the balance in it."""
    backbone = wrap(make_model("Mixtral, experts"))
    if rank is not None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        backbone.sequence, backbone.shares_prompts = SequenceGroup(2, rank, torch.distributed.new_group([0, 1])), False
    routing = backbone.record_routing()
    prompts, responses = Padded.from_lists([[5, 6, 7], [8], [9, 3]]), Padded.from_lists([[4, 2], [8, 7, 6, 5, 4, 3], [9]])
    hidden = backbone.hidden(prompts, responses)
    balance, counts = routing.take(3)
    loss = hidden[:, :-1][responses.mask()].square().sum() + balance
    (loss if rank is None else loss / 2).backward()  # as `MicroBatch.weight` does
    gradients = {name: weight.grad for name, weight in backbone.model.named_parameters() if weight.grad is not None}
    if rank is not None:
        for gradient in gradients.values():
            torch.distributed.all_reduce(gradient)
    found = {"balance": balance.detach(), "counts": counts, **gradients}
    torch.save(found, folder / f"{rank}.pt")


def test_experts_are_balanced_over_whole_rows(tmp_path):
    balance_of_experts(tmp_path, None)
    processes = [forked(balance_of_experts, tmp_path, rank) for rank in (0, 1)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    alone, *shared = (torch.load(tmp_path / f"{name}.pt") for name in (None, 0, 1))
    assert alone["counts"].sum() == 2 * 2 * 15  # layers, experts of a token, tokens
    for found in shared:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(
                found[name], value, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
