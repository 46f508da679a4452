"""What rankings teach beyond their order: ties, probabilities, ratings; by hand, and against the plain loss to the bit."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from align.core.errors import UserError
from align.reward.config import RewardConfig
from align.reward.labels import fit_length_slope, label_pairs, outcome_model, require_labels
from align.reward.loss import (
    bradley_terry,
    compare_by_preference,
    compare_by_rank,
    davidson,
    pairs_of,
    ranking_loss,
    rao_kupper,
    stack_pairs,
)
from align.tokenization.encoded import EncodedRanking


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def ranking(ranks, **labels):
    return EncodedRanking([1], [[2]] * len(ranks), ranks, **labels)


def loss_of(config, rewards, *rankings):
    return float(ranking_loss(doubles(*rewards), label_pairs(config, rankings), outcome_model(config)))


# ---------------------------------------------------------------------------------------------------- models of ties


def test_davidson_by_hand():
    # t = .5: nu = 2 x .5 / .5 = 2. At a difference of 2 ln 2 strengths are as 4 : 1, sqrt(4 x 1) = 2: 4 : 4 : 1.
    win, tie, lose = davidson(doubles(2 * math.log(2)), 0.5)
    assert [win.exp().item(), tie.exp().item(), lose.exp().item()] == pytest.approx([4 / 9, 4 / 9, 1 / 9])


def test_rao_kupper_by_hand():
    # t = .5: theta = 1.5 / .5 = 3. Strengths 6 : 1: 6 / (6 + 3) = 2/3, 1 / (1 + 18) = 1/19, and the rest is the tie's.
    win, tie, lose = rao_kupper(doubles(math.log(6)), 0.5)
    assert [win.exp().item(), lose.exp().item()] == pytest.approx([2 / 3, 1 / 19])
    assert tie.exp().item() == pytest.approx(1 - 2 / 3 - 1 / 19)


@pytest.mark.parametrize("model", [davidson, rao_kupper])
@pytest.mark.parametrize("tie_probability", [0.05, 0.25, 0.9])
def test_outcomes_are_probabilities_and_ties_likeliest_between_equals(model, tie_probability):
    difference = torch.linspace(-8, 8, 33, dtype=torch.float64)
    win, tie, lose = (part.exp() for part in model(difference, tie_probability))
    torch.testing.assert_close(win + tie + lose, torch.ones_like(win))
    torch.testing.assert_close(win, lose.flip(0))  # turned round, the same
    assert tie.argmax() == 16
    assert tie[16].item() == pytest.approx(tie_probability)
    assert (win.diff() > 0).all()


@pytest.mark.parametrize("model", [davidson, rao_kupper])
def test_with_hardly_any_ties_both_are_bradley_and_terrys(model):
    difference = doubles(-3.0, 0.0, 1.5)
    for ours, theirs in zip(model(difference, 1e-9)[::2], bradley_terry(difference)[::2], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_tie_pulls_rewards_together_by_hand():
    pairs = stack_pairs([compare_by_rank([1, 1], with_ties=True)], [2])
    rewards = doubles(2.0, 0.0).requires_grad_()
    loss = ranking_loss(rewards, pairs, lambda d: davidson(d, 0.5))
    # Strengths e^2 : 1 and nu 2: -log(2 e / (e^2 + 2 e + 1)) = 2 log(e + 1) - log 2 - 1
    assert loss.item() == pytest.approx(2 * math.log(math.e + 1) - math.log(2) - 1)
    loss.backward()
    # d/dd of log(e^(d/2) + 2 + e^(-d/2)) = (win - lose) / 2 = (e^2 - 1) / (e + 1)^2 / 2
    assert rewards.grad.tolist() == pytest.approx([(math.e - 1) / (math.e + 1) / 2, -(math.e - 1) / (math.e + 1) / 2])


def test_gradients_against_finite_differences():
    pairs = stack_pairs(
        [compare_by_rank([1, 2, 2], with_ties=True), compare_by_preference([[0, 0.6], [0.3, 0]], [1, 2], True)], [3, 2]
    )
    rewards = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    for model in (davidson, rao_kupper):
        assert torch.autograd.gradcheck(lambda x, m=model: ranking_loss(x, pairs, lambda d: m(d, 0.3)), rewards)


# ---------------------------------------------------------------------------------------------------- probabilities


def test_soft_targets_by_hand():
    # P(0 better) .7, P(1 better) .2, a tie .1, which goes to both alike: .75 and .25, at a difference of 2.
    item = ranking([1, 2], preferences=[[0.0, 0.7], [0.2, 0.0]])
    expected = 0.75 * math.log1p(math.exp(-2)) + 0.25 * math.log1p(math.exp(2))
    assert loss_of(RewardConfig(soft_targets=True), [2.0, 0.0], item) == pytest.approx(expected)
    # With a model of ties the .1 is the tie's.
    win, tie, lose = (float(part) for part in davidson(doubles(2.0), 0.25))
    config = RewardConfig(soft_targets=True, ties="davidson")
    assert loss_of(config, [2.0, 0.0], item) == pytest.approx(-(0.7 * win + 0.1 * tie + 0.2 * lose))


def test_the_loss_is_lowest_where_rewards_say_the_probabilities():
    item = ranking([1, 2], preferences=[[0.0, 0.8], [0.2, 0.0]])
    rewards = doubles(math.log(4), 0.0).requires_grad_()
    ranking_loss(rewards, label_pairs(RewardConfig(soft_targets=True), [item])).backward()
    assert rewards.grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


def test_a_pair_that_the_ranks_tie_or_turn_round_counts_by_its_probabilities():
    preferences = [[0, 0.5, 0.1], [0.5, 0, 0.9], [0.9, 0.1, 0]]
    found = compare_by_preference(preferences, [1, 1, 2])
    assert [(pair.better, pair.worse, pair.distance, pair.win) for pair in found] == [
        (0, 1, 0, 0.5),
        (2, 0, -1, 0.9),
        (1, 2, 1, 0.9),
    ]


def test_labels_that_are_sure_are_the_ranks():
    ranks = [2, 1, 3]
    sure = [[float(a < b) for b in ranks] for a in ranks]
    rewards = [0.3, -0.2, 1.0]
    soft = loss_of(RewardConfig(soft_targets=True), rewards, ranking(ranks, preferences=sure))
    assert soft == pytest.approx(loss_of(RewardConfig(), rewards, ranking(ranks)), abs=1e-12)


def test_without_the_setting_the_field_is_not_read():
    item = ranking([1, 2], preferences=[[0.0, 0.6], [0.4, 0.0]])
    assert loss_of(RewardConfig(), [2.0, 0.0], item) == pytest.approx(math.log1p(math.exp(-2)))


# ---------------------------------------------------------------------------------------------------- ratings


def test_rating_margins_by_hand():
    # Ratings 6, 3, 4 of ranks 1, 2, 3: margins .5 x 3 and .5 x 2, and none where the worse one is rated higher.
    item = ranking([1, 2, 3], ratings=[6, 3, 4])
    pairs = label_pairs(RewardConfig(rating_margin=0.5), [item])
    assert pairs.margin.tolist() == [1.5, 1.0, 0.0]
    # Rewards 1, 0, 0: differences 1, 1, 0 less the margins: -.5, 0, 0.
    expected = (math.log1p(math.exp(0.5)) + 2 * math.log(2)) / 3
    assert loss_of(RewardConfig(rating_margin=0.5), [1.0, 0.0, 0.0], item) == pytest.approx(expected)


def test_margins_add_up_and_ask_nothing_of_a_tie():
    pairs = label_pairs(RewardConfig(rating_margin=0.5), [ranking([1, 2], ratings=[7, 5], margin=0.25)])
    assert pairs.margin.tolist() == [1.25]
    tied = label_pairs(RewardConfig(rating_margin=0.5, ties="davidson"), [ranking([1, 1, 2], ratings=[7, 5, 1])])
    assert tied.margin.tolist() == [3.0, 2.0, 0.0]
    assert tied.weight.tolist() == pytest.approx([1 / 3] * 3)


# ---------------------------------------------------------------------------------------------------- the default, refusals


def test_by_default_loss_and_gradient_are_the_plain_ones_to_the_bit():
    rankings = [ranking([2, 1, 2], ratings=[3, 6, 2], preferences=[[0, 0.1, 0.5], [0.9, 0, 0.9], [0.5, 0.1, 0]])]
    rankings += [ranking([1, 2], margin=0.5), ranking([3, 1, 2, 4])]
    plain = pairs_of([item.ranks for item in rankings], [item.margin for item in rankings])
    for seed in range(20):
        one = (5 * torch.randn(9, generator=torch.Generator().manual_seed(seed))).requires_grad_()
        other = one.detach().clone().requires_grad_()
        loss = ranking_loss(one, label_pairs(RewardConfig(), rankings), outcome_model(RewardConfig()))
        difference = other[plain.better] - other[plain.worse] - plain.margin
        expected = -(plain.weight * logsigmoid(difference)).sum()
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"soft_targets": True}, "soft_targets: no ranking in x.jsonl has preferences"),
        ({"rating_margin": 0.5}, "rating_margin: no ranking in x.jsonl has ratings"),
    ],
)
def test_a_setting_without_its_labels_is_refused(settings, message):
    config = RewardConfig(train_data="x.jsonl", **settings)
    with pytest.raises(UserError, match=message):
        require_labels(config, [ranking([1, 2])])
    labels = {"ratings": [3, 2], "preferences": [[0, 0.9], [0.1, 0]]}
    require_labels(config, [ranking([1, 2]), ranking([1, 2], **labels)])


# ------------------------------------------------------------------------------------------------------------- length


def long_and_short(wins_of_short, wins_of_long, longer_by=3):
    """Rankings of a short and a long response, so many of each order."""
    orders = [[1, 2]] * wins_of_short + [[2, 1]] * wins_of_long
    return [replace(ranking(order), responses=[[5], [5] * (1 + longer_by)]) for order in orders]


def test_the_slope_of_length_by_hand():
    rankings = long_and_short(3, 1)
    slope = fit_length_slope(label_pairs(RewardConfig(), rankings), rankings)
    assert slope == pytest.approx(-math.log(3) / 3, abs=1e-4)  # log-odds of the longer one: -log 3, over 3 tokens
    same = long_and_short(3, 1, longer_by=0)
    assert fit_length_slope(label_pairs(RewardConfig(), same), same) == 0.0
    always = long_and_short(4, 0)
    assert -5 / 3 - 1e-3 < fit_length_slope(label_pairs(RewardConfig(), always), always) < -1


def test_a_reward_has_nothing_left_to_learn_of_length():
    """At the fitted slope, the gradient with respect to a reward that is proportional to length is 0."""
    rankings = long_and_short(3, 1) + long_and_short(5, 4, longer_by=7)
    slope = fit_length_slope(label_pairs(RewardConfig(), rankings), rankings)
    lengths = torch.tensor([float(len(ids)) for item in rankings for ids in item.responses])
    for left_out, at_rest in ((slope, True), (0.0, False)):
        per_token = torch.zeros((), requires_grad=True)
        ranking_loss(per_token * lengths, label_pairs(RewardConfig(), rankings, left_out)).backward()
        assert (abs(float(per_token.grad)) < 1e-3) == at_rest
