import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import flops_profile
from align.models.heads import ScalarHead
from align.reward import RewardConfig, RewardTrainer
from align.reward.loss import (
    centering_loss,
    compare_by_preference,
    dpo_losses,
    ipo_losses,
    ordered_rightly,
    pairs_of,
    ranking_loss,
)
from align.reward.rankings import CHANCE_LOSS, chance_warning, group_sizes, label_pairs, ranking_metrics, with_rewards
from align.reward.train import batch_loss, best_tokens, build_module, example_flops
from align.tokenization.encoded import EncodedRanking
from align.training.setup import build_engine
from tests.files import metrics_of
from tests.models.losses import ADAPTER, assert_invariant, loss_of_rows, rankings
from tests.settings import run_settings

QUICK = settings(deadline=None, max_examples=40)

RANKS = st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=5), min_size=1, max_size=4)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def with_margins(ranks, margins):
    pairs = pairs_of(ranks)
    return pairs._replace(margin=torch.tensor(margins)[pairs.ranking])


def ranking(ranks, **labels):
    return EncodedRanking([1], [[2]] * len(ranks), ranks, **labels)


def soft_loss(rewards, *rankings):
    return float(ranking_loss(doubles(rewards), label_pairs(rankings, soft_targets=True)))


def sigmoid_loss(difference):
    """-log sigmoid of a difference of rewards."""
    return math.log1p(math.exp(-difference))


def test_pairs_of_two_rankings():
    pairs = with_margins([[2, 1], [1, 2, 2, 3]], [0.5, 0.0])
    # Ranking 0 holds responses 0, 1: 1 beats 0. Ranking 1 holds 2..5: 2 beats 3, 4, 5; 3 and 4 (tied) beat 5.
    assert list(zip(pairs.better.tolist(), pairs.worse.tolist(), strict=True)) == [
        (1, 0),
        (2, 3),
        (2, 4),
        (2, 5),
        (3, 5),
        (4, 5),
    ]
    assert pairs.weight.tolist() == pytest.approx([1.0] + [0.2] * 5)
    assert pairs.distance.tolist() == [1, 1, 1, 2, 1, 1]
    assert pairs.ranking.tolist() == [0, 1, 1, 1, 1, 1]
    assert pairs.margin.tolist() == [0.5, 0, 0, 0, 0, 0]


def test_a_ranking_of_ties_alone_has_no_pair_and_no_loss():
    pairs = pairs_of([[1, 1, 1]])
    assert len(pairs.better) == 0
    assert ranking_loss(doubles([1.0, 2.0, 3.0]), pairs).item() == 0.0
    assert centering_loss(doubles([1.0, 2.0, 3.0]), pairs).item() == 0.0


@pytest.mark.parametrize(
    ("rewards", "margin", "expected"),
    [
        ([1.0, 1.0], 0.0, 0.6931472),  # ln 2
        ([3.0, 1.0], 0.0, 0.1269280),  # ln(1 + exp(-2))
        ([1.0, 3.0], 0.0, 2.1269280),  # 2 more
        ([3.0, 1.0], 2.0, 0.6931472),  # a margin of 2 eats a lead of 2
        ([3.0, 1.0], 3.0, 1.3132617),  # ln(1 + exp(1))
    ],
)
def test_loss_of_a_pair_by_hand(rewards, margin, expected):
    pairs = label_pairs([ranking([1, 2], margin=margin)], False)
    assert ranking_loss(doubles(rewards), pairs).item() == pytest.approx(expected, abs=1e-7)


def test_losses_of_rankings_by_hand():
    # Order 1 > 0 > 2 with rewards 0, 1, -2: differences 1 (1 over 0), 3 (1 over 2), 2 (0 over 2), each a third.
    # (.3132617 + .0485874 + .1269280) / 3 = .1629257
    assert ranking_loss(doubles([0.0, 1.0, -2.0]), pairs_of([[2, 1, 3]])).item() == pytest.approx(0.1629257, abs=1e-7)
    rewards = doubles([0.0, 1.0, 0.5, 0.5, 2.0])
    # Ranking 0: response 1 over 0 by 1. Ranking 1: responses 2 and 3 tied below 4: 1.5 over each, half a weight each.
    expected = sigmoid_loss(1.0) + (sigmoid_loss(1.5) + sigmoid_loss(1.5)) / 2
    assert ranking_loss(rewards, pairs_of([[2, 1], [2, 2, 1]])).item() == pytest.approx(expected, abs=1e-7)
    # Pairs 1 over 0, 1 over 2, 0 over 2 of rewards 0, 1, -2: sums 1, -1, -2, squares 1 + 1 + 4 = 6, a third is 2.
    assert centering_loss(doubles([0.0, 1.0, -2.0]), pairs_of([[2, 1, 3]])).item() == pytest.approx(2.0, abs=1e-6)
    assert centering_loss(doubles([3.0, -3.0]), pairs_of([[1, 2]])).item() == 0.0
    # A shift of both rewards by c makes (2c)^2.
    assert centering_loss(doubles([3.5, -2.5]), pairs_of([[1, 2]])).item() == pytest.approx(1.0, abs=1e-6)


def test_gradients_against_finite_differences():
    pairs = with_margins([[2, 1], [1, 2, 2, 3]], [0.5, 0.0])
    rewards = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ranking_loss(x, pairs), rewards)
    assert torch.autograd.gradcheck(lambda x: centering_loss(x, pairs), rewards)
    assert torch.autograd.gradcheck(lambda x: dpo_losses(x, 0.7, 0.1), rewards)
    assert torch.autograd.gradcheck(lambda x: ipo_losses(x, 0.7), rewards)


def test_far_apart_rewards_neither_overflow_nor_lose_their_gradient():
    rewards = doubles([-1000.0, 1000.0]).requires_grad_()
    loss = ranking_loss(rewards, pairs_of([[1, 2]]))
    loss.backward()
    assert loss.item() == 2000.0
    assert rewards.grad.tolist() == [-1.0, 1.0]


@QUICK
@given(RANKS, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_order_of_responses_and_batching_of_rankings_do_not_matter(ranks, seed, shuffler):
    rng = torch.Generator().manual_seed(seed)
    rewards = [torch.randn(len(row), generator=rng, dtype=torch.float64) for row in ranks]
    whole = ranking_loss(torch.cat(rewards), pairs_of(ranks)).item()
    alone = 0.0
    for row, values in zip(ranks, rewards, strict=True):
        order = shuffler.sample(range(len(row)), len(row))
        alone += ranking_loss(values[order], pairs_of([[row[i] for i in order]])).item()
    assert whole == pytest.approx(alone, abs=1e-6)
    shifted = ranking_loss(torch.cat(rewards) + 7.0, pairs_of(ranks)).item()
    assert shifted == pytest.approx(whole, abs=1e-6), "only differences count"


def test_soft_targets_by_hand():
    # P(0 better) .7, P(1 better) .2; half of the tie's .1 goes to each: .75 and .25, at a difference of 2.
    item = ranking([1, 2], preferences=[[0.0, 0.7], [0.2, 0.0]])
    expected = 0.75 * math.log1p(math.exp(-2)) + 0.25 * math.log1p(math.exp(2))
    assert soft_loss([2.0, 0.0], item) == pytest.approx(expected)
    item = ranking([1, 2], preferences=[[0.0, 0.8], [0.2, 0.0]])
    rewards = doubles([math.log(4), 0.0]).requires_grad_()
    ranking_loss(rewards, label_pairs([item], True)).backward()
    assert rewards.grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


def test_labels_that_are_sure_are_the_ranks_and_a_ranking_without_labels_has_its_own():
    ranks, rewards = [2, 1, 3], [0.3, -0.2, 1.0]
    sure = ranking(ranks, preferences=[[float(a < b) for b in ranks] for a in ranks])
    plain = float(ranking_loss(doubles(rewards), label_pairs([ranking(ranks)], False)))
    of_others = ranking(ranks, preferences=[[float(a > b) for b in ranks] for a in ranks])
    assert float(ranking_loss(doubles(rewards), label_pairs([of_others], False))) == plain, "only soft targets read them"
    assert soft_loss(rewards, sure) == pytest.approx(plain, abs=1e-12)
    assert soft_loss(rewards * 2, sure, ranking(ranks)) == pytest.approx(2 * plain, abs=1e-12)


def test_a_pair_that_the_ranks_tie_or_turn_round_counts_by_its_probabilities():
    preferences = [[0, 0.5, 0.1], [0.5, 0, 0.9], [0.9, 0.1, 0]]
    found = compare_by_preference(preferences, [1, 1, 2])
    assert [(pair.better, pair.worse, pair.distance, pair.win) for pair in found] == [
        (0, 1, 0, 0.5),
        (2, 0, -1, 0.9),
        (1, 2, 1, 0.9),
    ]


def test_validation_has_the_soft_targets_of_training_also_of_tied_rankings(tmp_path):
    """Ranks say the opposite of the preferences, or nothing."""
    rows = [
        {"prompt": f"q{i}", "responses": ["yes", "no"], "ranks": [1, 1 + i % 2], "preferences": [[0, 0.1], [0.9, 0]]}
        for i in range(8)
    ]
    settings = run_settings(tmp_path, batch_size=8, eval_steps=1)
    config = RewardConfig(soft_targets=True, learning_rate=1e-2, num_train_epochs=4, warmup_ratio=0.0, **settings)
    trainer = RewardTrainer("tiny-llama", rows, config, validation_data=rows)
    assert len(trainer.order.examples) == len(trainer.held_out) == 8
    trainer.train()
    found = metrics_of(tmp_path)
    # An update's loss is that of the weights before it: the validation loss after the update before.
    for before, after in pairwise(found):
        assert after["ranking_loss"] == pytest.approx(before["validation/loss"], abs=1e-4)
    assert found[-1]["validation/loss"] < found[0]["validation/loss"]
    assert f"| validation/loss | {found[-1]['validation/loss']:.4g} |" in (tmp_path / "model" / "README.md").read_text()
    assert len(json.loads((tmp_path / "validation.json").read_text())) == 4  # those with an order


def test_soft_targets_of_data_without_preferences_are_refused(tmp_path):
    rows = [{"prompt": "Hi", "chosen": "Hello", "rejected": "No"}]
    config = RewardConfig(soft_targets=True, output_dir=str(tmp_path), report_to=["none"], dtype="float32")
    with pytest.raises(UserError, match="soft_targets: no ranking in 1 record in memory"):
        RewardTrainer("tiny-llama", rows, config)


def test_rewards_that_are_worse_than_none_are_told_in_run_and_card(tmp_path, capfd):
    """The labels of the held-out rankings are turned round."""
    rows = [{"prompt": f"q{i}", "responses": ["yes", "no"], "ranks": [1, 2]} for i in range(8)]
    turned = [{**row, "ranks": [2, 1]} for row in rows]
    settings = run_settings(tmp_path, batch_size=8)
    config = RewardConfig(learning_rate=1e-2, num_train_epochs=6, warmup_ratio=0.0, **settings)
    RewardTrainer("tiny-llama", rows, config, validation_data=turned).train()
    found = [row["validation/loss"] for row in metrics_of(tmp_path) if "validation/loss" in row]
    assert max(found) > CHANCE_LOSS
    warning = chance_warning(max(found))
    assert warning in " ".join(capfd.readouterr().err.split())
    kept = min(found)
    card = (tmp_path / "model" / "README.md").read_text()
    assert ("| warning |" in card) == (kept > CHANCE_LOSS)


def test_responses_that_are_cut_are_scored_at_the_end_token_and_not_learned_to_end(tmp_path):
    rows = [{"prompt": f"q{i}", "responses": ["yes" * 9, "no" * 9], "ranks": [1, 2]} for i in range(4)]
    limits = {"max_response_tokens": 5, "overlong": "truncate"}
    settings = run_settings(tmp_path, **limits)
    trainer = RewardTrainer("tiny-llama", rows, RewardConfig(lm_loss_weight=0.5, **settings), demonstrations=[
        {"prompt": "Hi", "completion": "long" * 9}
    ])  # fmt: skip
    end = trainer.loaded.tokenization.end_id
    for ranking in (*trainer.order.examples, *trainer.demonstrated):
        assert [ids[-1] for ids in ranking.responses] == [end] * len(ranking.responses)
        assert set(map(len, ranking.responses)) == {5}
    assert {tuple(best_tokens(ranking)) for ranking in trainer.order.examples} == {(4, 0)}


# Losses of DPO and IPO


@pytest.mark.parametrize(
    ("difference", "beta", "smoothing", "expected"),
    [
        (0.0, 0.1, 0.0, 0.6931472),  # ln 2: the policy is its reference
        (10.0, 0.1, 0.0, 0.3132617),  # ln(1 + exp(-1))
        (-10.0, 0.1, 0.0, 1.3132617),  # 1 more
        (10.0, 0.5, 0.0, 0.0067153),  # ln(1 + exp(-5))
        (10.0, 0.1, 0.1, 0.4132617),  # .9 x .3132617 + .1 x 1.3132617
        (0.0, 0.1, 0.3, 0.6931472),
    ],
)
def test_dpo_by_hand(difference, beta, smoothing, expected):
    assert dpo_losses(doubles([difference]), beta, smoothing).item() == pytest.approx(expected, abs=1e-7)


def test_losses_of_dpo_and_ipo_by_hand():
    difference = doubles([10.0, -10.0]).requires_grad_()
    dpo_losses(difference, 0.1).sum().backward()
    # -beta sigmoid(-beta d): .1 x .2689414 and .1 x .7310586 (DPO, the gradient in section 4)
    assert difference.grad.tolist() == pytest.approx([-0.02689414, -0.07310586], abs=1e-7)
    # 1 / (2 x .1) = 5: (5 - 5)^2, (2 - 5)^2, (-1 - 5)^2
    assert ipo_losses(doubles([5.0, 2.0, -1.0]), 0.1).tolist() == pytest.approx([0.0, 9.0, 36.0])


def test_a_hopeless_pair_neither_overflows_nor_loses_its_gradient():
    difference = doubles([-1e6]).requires_grad_()
    loss = dpo_losses(difference, 0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1e5)
    assert difference.grad.item() == pytest.approx(-0.1)


@pytest.mark.parametrize("lora_r", [0, ADAPTER])
@pytest.mark.parametrize("terms", [{}, {"centering_weight": 0.1}, {"lm_weight": 0.5}], ids=str)
def test_the_reward_loss(tiny_name, load_sharp, make_run, hand_rollout, lora_r, terms):
    loaded = load_sharp(tiny_name, adapter="reward", lora_r=lora_r)
    run = make_run(RewardConfig, "reward")
    torch.manual_seed(2)
    model = build_module(loaded, ScalarHead(loaded.backbone.hidden_size, bias=False), "", "lm_weight" in terms)
    engine, examples = build_engine(run, model, 1), rankings(hand_rollout)
    given = {"soft_targets": False, "centering_weight": 0.0, "lm_weight": 0.0} | terms
    assert_invariant(engine, group_sizes(loaded.backbone, examples), loss_of_rows(batch_loss, engine, examples, **given))


def test_the_language_model_loss_beside_rewards_by_hand(tiny_name, load_sharp, make_run, hand_rollout):
    """The mean of -log p over the best responses' tokens, of which the second ranking's is one of four."""
    loaded, pair = load_sharp(tiny_name), rankings(hand_rollout)[:2]
    found, flops, profile = {}, {}, flops_profile(loaded.backbone, None)
    for weight in (0.5, 0.0):  # without that loss, a vocabulary matrix of its own is frozen
        torch.manual_seed(2)
        model = build_module(loaded, ScalarHead(loaded.backbone.hidden_size, bias=False), "", weight > 0)
        engine = build_engine(make_run(RewardConfig, "reward"), model, 1)
        found[weight] = batch_loss(engine.module, pair, pair, False, 0.0, weight, loaded.backbone.device)
        flops[weight] = sum(example_flops(loaded.backbone, profile, ranking, weight) for ranking in pair)
    prompts, responses = [prompt.ids for prompt in hand_rollout.prompts], hand_rollout.responses
    best, total, count = [(prompts[0], responses[1]), (prompts[1], responses[1])], 0.0, 0
    with torch.no_grad():
        for prompt, response in best:
            hidden = loaded.backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
            every = torch.log_softmax(loaded.backbone.logits(hidden[0, :-1]), -1)
            total -= sum(float(every[place, token]) for place, token in enumerate(response))
            count += len(response)
    assert float(found[0.5][1]["lm_loss"].detach()) == pytest.approx(total / count, abs=1e-5)
    assert float(found[0.5][0].detach()) == pytest.approx(float(found[0.0][0].detach()) + 0.5 * total / count, abs=1e-5)
    assert "lm_loss" not in found[0.0][1]
    assert flops[0.5] > flops[0.0]


@given(st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 2.0])] * 2), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_count_one_half_in_training_as_in_validation(rewards):
    pairs = [EncodedRanking([5], [[6], [7]], [1, 2]) for _ in rewards]

    def model(prompt, response, prompt_of_response):
        return torch.tensor(rewards).flatten()

    _, sums = batch_loss(model, pairs, pairs, False, 0.0, 0.0, torch.device("cpu"))
    expected = sum(1.0 if better > worse else 0.5 if better == worse else 0.0 for better, worse in rewards) / len(rewards)
    assert float(sums["accuracy"]) == pytest.approx(expected)
    assert ranking_metrics(with_rewards(pairs, rewards))["accuracy"] == pytest.approx(expected)


def test_rewards_that_differ_by_rounding_are_equal():
    assert ordered_rightly(torch.tensor([1.0, -1.0, 0.0, 1e-6, -1e-6, 1e-4])).tolist() == [1.0, 0.0, 0.5, 0.5, 0.5, 1.0]
