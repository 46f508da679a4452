"""The loss of SFT in batches: padding, order and micro-batches never change it; only the assistant's tokens count."""

import json

import pytest
import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.heads import LanguageModel
from align.sft import SFTConfig, SFTTrainer
from align.sft.train import batch_loss, token_counts
from align.training.start import build_engine
from tests.models.losses import ADAPTER, assert_invariant, hand_turns, loss_of_rows


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("lora_r", [0, ADAPTER])
def test_the_sft_loss(tiny_name, load_sharp, make_run, hand_rollout, weight, lora_r):
    if weight and not load_sharp(tiny_name).backbone.prompt_in_row:
        weight = 0.0  # an encoder predicts nothing: refused by `encode`
    loaded = load_sharp(tiny_name, lora_r=lora_r)
    run = make_run(SFTConfig, "sft", prompt_loss_weight=weight)
    engine = build_engine(run, LanguageModel(loaded.backbone, loaded.adapter), 1)
    turns = hand_turns(hand_rollout)

    assert_invariant(engine, token_counts(turns), loss_of_rows(batch_loss, engine, turns, prompt_weight=weight))


@torch.no_grad()
def test_the_sft_loss_is_a_mean_over_tokens_not_over_rows(tiny_name, load_sharp, make_run, hand_rollout):
    loaded = load_sharp(tiny_name)
    engine = build_engine(make_run(SFTConfig, "sft"), LanguageModel(loaded.backbone, None), 1)
    turns, sums, count = hand_turns(hand_rollout), 0.0, 0
    for turn in turns:
        hidden = loaded.backbone.hidden(Padded.from_lists([turn.prompt]), Padded.from_lists([turn.response]))
        every = torch.log_softmax(loaded.backbone.logits(hidden[0, :-1]), -1)
        for place, (token, learn) in enumerate(zip(turn.response, turn.loss_mask, strict=True)):
            sums, count = sums - learn * float(every[place, token]), count + learn
    # Lengths 9, 1, 4, 7, 3, 6 lose 3, 0, 1, 2, 1, 2 tokens: 30 - 9 = 21 are learned.
    assert count == 21
    loss, sums_of_batch = batch_loss(engine.module, turns, turns, 0.0, loaded.backbone.device)
    assert float(sums_of_batch["tokens/trained"]) == 21
    assert float(loss) == pytest.approx(sums / 21, abs=1e-5)


def test_a_nan_ends_the_run_and_its_batch_is_saved(sharp_folders, tmp_path, monkeypatch):
    monkeypatch.setattr("align.sft.train.demonstration_loss", lambda log_probs, *_: log_probs.sum() * float("nan"))
    rows = [{"prompt": f"Hi {number}", "completion": "Yes."} for number in range(2)]
    config = SFTConfig(output_dir=str(tmp_path), dtype="float32", report_to=["none"], batch_size=2)
    with pytest.raises(UserError, match="update 1: the loss is not a finite number; the weights before it are unharmed"):
        SFTTrainer(sharp_folders["tiny-llama"], rows, config).train()
    saved = json.loads((tmp_path / "broken-batch-1.json").read_text())
    assert sorted("Hi 0" in row["prompt"] for row in saved) == [False, True]
    assert all("Yes." in row["response"] for row in saved)
