"""Scores as they are learned from: running statistics, clipping, missing ends and length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.config import PPOConfig
from align.ppo.extensions.interim import LengthAdjustment
from align.ppo.records import Rollout
from align.ppo.scores import (
    RunningMoments,
    ScoreNormalization,
    adjust_for_length,
    apply_missing_eos,
    combine_rewards,
    disagreement,
    length_slope,
)
from align.tokenization.encoded import EncodedPrompt


def rollout(lengths, ended):
    prompts = [EncodedPrompt(({"role": "user", "content": "Hi"},), [1])] * len(lengths)
    return Rollout(prompts, [[2] * length for length in lengths], ended, [""] * len(lengths))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=5))
def test_running_moments_are_those_of_all_numbers_at_once(batches):
    moments, flat = RunningMoments(), torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    for batch in batches:
        kept = RunningMoments()
        kept.load_state_dict(moments.state_dict())  # as a run that was killed goes on
        kept.add(torch.tensor(batch, dtype=torch.float64))
        moments = kept
    assert moments.mean == pytest.approx(float(flat.mean()), abs=1e-9)
    assert moments.squares == pytest.approx(float(((flat - flat.mean()) ** 2).sum()), abs=1e-6)


@pytest.mark.parametrize(
    ("choice", "clip", "learned"),
    [
        ("none", 0.0, [1.0, 3.0, 8.0]),
        ("none", 2.5, [1.0, 2.5, 2.5]),
        # Mean 4, standard deviation sqrt(26/3) = 2.9439203.
        ("scale", 0.0, [0.3396831, 1.0190493, 2.7174649]),
        ("standardize", 0.0, [-1.0190493, -0.3396831, 1.3587324]),
        ("standardize", 1.0, [-1.0, -0.3396831, 1.0]),
    ],
)
def test_normalizing_and_clipping_by_hand(choice, clip, learned):
    given = torch.tensor([1.0, 3.0, 8.0])
    assert ScoreNormalization(choice, clip)(given).tolist() == pytest.approx(learned, abs=1e-6)
    assert given.tolist() == [1.0, 3.0, 8.0]


def test_statistics_go_on_over_rollouts():
    normalization = ScoreNormalization("standardize", 0.0)
    normalization(torch.tensor([1.0, 3.0]))
    assert normalization(torch.tensor([8.0])).tolist() == pytest.approx([1.3587324], abs=1e-6)
    assert normalization.metrics() == pytest.approx({"reward/running_mean": 4.0, "reward/running_std": 2.9439203})


def learned_from(scores, answers, normalization, **settings):
    """Training scores as the loop makes them, and the slope."""
    config = PPOConfig(length_adjustment=settings.pop("share", 1.0), **settings)
    adjustment = LengthAdjustment(config)
    scores = normalization(adjustment.transform_scores(scores, answers, {}))
    learned = apply_missing_eos(scores, answers.ended_mask, config.missing_eos, config.missing_eos_score)
    return learned, adjustment.metrics()["reward/length_slope"]


def test_length_adjustment_by_hand():
    """Two prompts of three answers. The first's are 1, 2 and 3 tokens long with scores 5, 3, 1; of the second's, 2, 4 and 9
    long with scores 0, 2 and -50, the last was cut off. Distances from their means: -1, 0, 1 and -1, 1; so the slope is
    (-1 * 5 + 1 * 1 - 1 * 0 + 1 * 2) / (1 + 1 + 1 + 1) = -0.5 a token. The last one is 6 longer than 3, the mean of those
    that ended, so that its length made 3 of its -50."""
    scores, lengths = torch.tensor([5.0, 3.0, 1.0, 0.0, 2.0, -50.0]), [1, 2, 3, 2, 4, 9]
    answers = rollout(lengths, [True] * 5 + [False])
    for share, learned in ((1.0, [4.5, 3.0, 1.5, -0.5, 2.5, -47.0]), (0.5, [4.75, 3.0, 1.25, -0.25, 2.25, -48.5])):
        group = {"samples_per_prompt": 3, "rollout_size": 6, "minibatches": 1}
        found, slope = learned_from(
            scores, answers, ScoreNormalization("none", 0.0), share=share, missing_eos="keep", **group
        )
        assert found.tolist() == pytest.approx(learned)
        assert slope == pytest.approx(-0.5)
        assert scores.tolist() == [5.0, 3.0, 1.0, 0.0, 2.0, -50.0]  # what was scored is reported and compared


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 60), st.booleans()), min_size=8, max_size=8),
    st.permutations(range(2)),
)
def test_after_the_adjustment_length_explains_nothing_whatever_the_order_of_prompts(rows, order):
    scores, lengths, ended = map(torch.tensor, zip(*rows, strict=True))
    slope = length_slope(scores, lengths, ended, 4)
    adjusted = adjust_for_length(scores, lengths, ended, 4, slope)
    assert length_slope(adjusted, lengths, ended, 4) == pytest.approx(0.0, abs=1e-5)
    kept = ended.view(2, 4)
    for before, after, chosen in zip(scores.view(2, 4), adjusted.view(2, 4), kept, strict=True):
        assert float(after[chosen].sum()) == pytest.approx(float(before[chosen].sum()), abs=1e-4)
    swapped = [part.view(2, 4)[list(order)].flatten() for part in (scores, lengths, ended)]
    assert length_slope(*swapped, 4) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize(("rule", "cut_off"), [("keep", 2.0), ("lower", 1.0), ("replace", -1.0)])
def test_running_into_the_limit_earns_nothing_where_only_length_is_scored(rule, cut_off):
    """Scores of 0.1 a token: without its length each answer is worth 2, the score of the mean length, of 20 tokens.

    Of the second prompt no answer ended. Its answers are equally long, so nothing is known of their length's share.
    """
    answers = rollout([10, 20, 30, 64, 64, 64, 64, 64], [True, True, True, *[False] * 5])
    group = {"samples_per_prompt": 4, "rollout_size": 8}
    settings = group | {"missing_eos": rule, "missing_eos_score": -1.0}
    learned, _ = learned_from(0.1 * answers.lengths.float(), answers, ScoreNormalization("none", 0.0), **settings)
    assert learned[:4].tolist() == pytest.approx([2.0, 2.0, 2.0, cut_off], abs=1e-5)
    unknown = {"keep": 6.4, "lower": 5.4, "replace": -1.0}[rule]
    assert learned[4:].tolist() == pytest.approx([unknown] * 4, abs=1e-5)


def test_under_replace_the_running_statistics_take_cut_off_answers_as_they_were_scored():
    """Lengths 1 and 3 with scores 0 and 2, both 1 without their length; a score of 9 that is replaced afterwards."""
    group = {"samples_per_prompt": 3, "rollout_size": 3}
    answers, normalization = rollout([1, 3, 9], [True, True, False]), ScoreNormalization("none", 0.0)
    learned, _ = learned_from(torch.tensor([0.0, 2.0, 9.0]), answers, normalization, missing_eos="replace", **group)
    assert learned.tolist() == pytest.approx([1.0, 1.0, -1.0])
    assert normalization.metrics()["reward/running_mean"] == pytest.approx((1 + 1 + 9) / 3)


REWARDS = torch.tensor([[1.0, -2.0], [2.0, -2.0], [6.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "weight", "expected"),
    [
        ("mean", 9.0, [3.0, -2.0]),
        ("wco", 9.0, [1.0, -2.0]),
        # Variance over members: (4 + 1 + 9) / 3 = 14/3; where all agree nothing is taken off.
        ("uwo", 0.3, [3.0 - 0.3 * 14 / 3, -2.0]),
        ("uwo", 0.0, [3.0, -2.0]),
    ],
)
def test_rules_by_hand(rule, weight, expected):
    assert combine_rewards(REWARDS, rule, weight).tolist() == pytest.approx(expected, abs=1e-12)


def test_disagreement_by_hand():
    assert disagreement(REWARDS).tolist() == pytest.approx([(14 / 3) ** 0.5, 0.0], abs=1e-12)


@pytest.mark.parametrize(
    ("rule", "penalty", "expected"),
    [
        ("replace", -1.0, [3.0, -1.0, -1.0]),
        ("replace", 0.5, [3.0, 0.5, 0.5]),
        ("lower", -1.0, [3.0, 1.0, -6.0]),  # 2 - 1 and -5 - 1
        ("lower", 1.0, [3.0, 1.0, -6.0]),  # the size counts, not the sign
        ("keep", -1.0, [3.0, 2.0, -5.0]),
    ],
)
def test_penalties_for_a_missing_end(rule, penalty, expected):
    scores = torch.tensor([3.0, 2.0, -5.0])
    assert apply_missing_eos(scores, torch.tensor([True, False, False]), rule, penalty).tolist() == expected


def test_one_length_explains_nothing():
    assert length_slope(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]), torch.tensor([True, True]), 2) == 0.0
    assert length_slope(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]), torch.tensor([True, False]), 2) == 0.0
