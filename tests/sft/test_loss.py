import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.heads import LanguageModel
from align.sft import SFTConfig, SFTTrainer
from align.sft.loss import demonstration_loss
from align.sft.train import batch_loss, token_counts
from align.training.setup import build_engine
from tests.models.losses import ADAPTER, assert_invariant, hand_turns, loss_of_rows

QUICK = settings(deadline=None, max_examples=40)

LOG_PROBS = [[-1.0, -2.0, -4.0, -8.0], [-0.5, -0.25, float("nan"), float("inf")]]
LEARN = torch.tensor([[False, True, True, False], [True, True, False, False]])
CONTEXT = torch.tensor([[True, False, False, True], [False, False, False, False]])


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_loss_and_gradient_by_hand():
    # (2 + 4 + .5 + .25) / 4 tokens; with the prompt 6.75 / 4 + .5 x (1 + 8) / 2 = 1.6875 + 2.25
    assert demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.0).item() == 1.6875
    assert demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.5).item() == 3.9375
    log_probs = doubles(LOG_PROBS).requires_grad_()
    demonstration_loss(log_probs, LEARN, CONTEXT, 4, 2, 0.5).backward()
    # -1/4 where a token is learned, -.5 / 2 in the prompt, 0 elsewhere, though NaN stands there.
    assert log_probs.grad.tolist() == [[-0.25, -0.25, -0.25, -0.25], [-0.25, -0.25, 0.0, 0.0]]


def test_counts_are_those_of_the_global_batch():
    whole = demonstration_loss(doubles(LOG_PROBS), LEARN, CONTEXT, 4, 2, 0.5).item()
    rows = [
        demonstration_loss(doubles([LOG_PROBS[row]]), LEARN[row : row + 1], CONTEXT[row : row + 1], 4, 2, 0.5).item()
        for row in range(2)
    ]
    assert sum(rows) == whole
    # A mean of the rows' own means would be (3 + .375) / 2 = 1.6875 only by chance: row 1 here has 3 of 4 tokens.
    learn = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert demonstration_loss(doubles(LOG_PROBS), learn, CONTEXT, 4, 2, 0.0).item() == (1 + 2 + 4 + 0.5) / 4


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_batch_in_which_nothing_is_learned_costs_nothing(weight):
    nothing = torch.zeros_like(LEARN)
    assert demonstration_loss(doubles(LOG_PROBS), nothing, nothing, 0, 0, weight).item() == 0.0


@QUICK
@given(st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([0.0, math.nan, -math.inf, 3.0]))
def test_padding_changes_nothing(seed, extra, garbage):
    rng = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    learn = torch.rand(3, 5, generator=rng) < 0.5
    wide = torch.cat([log_probs, torch.full((3, extra), garbage, dtype=torch.float64)], 1)
    none = torch.zeros(3, extra, dtype=torch.bool)
    found = demonstration_loss(wide, torch.cat([learn, none], 1), torch.cat([~learn, none], 1), 8, 7, 0.4)
    assert found.item() == pytest.approx(demonstration_loss(log_probs, learn, ~learn, 8, 7, 0.4).item(), rel=1e-14)


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
    monkeypatch.setattr("align.sft.train.demonstration_loss", lambda log_probs, *_, **__: log_probs.sum() * float("nan"))
    rows = [{"prompt": f"Hi {number}", "completion": "Yes."} for number in range(2)]
    config = SFTConfig(output_dir=str(tmp_path), dtype="float32", report_to=["none"], batch_size=2)
    with pytest.raises(UserError, match=r"^update 1: the loss is not a finite number"):
        SFTTrainer(sharp_folders["tiny-llama"], rows, config).train()
    saved = json.loads((tmp_path / "broken-batch-1.json").read_text())
    assert sorted("Hi 0" in row["prompt"] for row in saved) == [False, True]
    assert all("Yes." in row["response"] for row in saved)
