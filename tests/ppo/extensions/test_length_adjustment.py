import pytest
import torch

from align.ppo.config import PPOConfig
from align.ppo.extensions.length_adjustment import HoldLength, LengthAdjustment, length_slope
from align.ppo.records import Rollout, TrainingSignal
from align.ppo.rewards import MissingEos
from align.tokenization.encoded import EncodedPrompt


def rollout(lengths, ended):
    prompts = [EncodedPrompt(({"role": "user", "content": "Hi"},), [1])] * len(lengths)
    return Rollout(prompts, [[2] * length for length in lengths], ended, [""] * len(lengths))


def learned_from(scores, answers, share=1.0, **settings):
    """Training scores as the loop makes them, and the slope."""
    config = PPOConfig(length_adjustment=share, **settings)
    adjustment = LengthAdjustment(share)
    adjustment.samples = config.samples_per_prompt
    signal = adjustment.shape(TrainingSignal(scores, {}), answers, None)
    missing_eos = MissingEos(config.missing_eos_penalty, config.missing_eos_score)
    learned = missing_eos.apply(signal.scores, answers.ended_mask)
    return learned, adjustment.metrics()["reward/length_slope"]


def test_length_adjustment_by_hand():
    """Two prompts of three answers. The first's are 1, 2 and 3 tokens long with scores 5, 3, 1; of the second's, 2, 4 and 9
    long with scores 0, 2 and -50, the last was cut off. Distances from their means: -1, 0, 1 and -1, 1; so the slope is
    (-1 * 5 + 1 * 1 - 1 * 0 + 1 * 2) / (1 + 1 + 1 + 1) = -0.5 a token. The last one is 6 longer than 3, the mean of those
    that ended, so that its length made 3 of its -50."""
    scores, lengths = torch.tensor([5.0, 3.0, 1.0, 0.0, 2.0, -50.0]), [1, 2, 3, 2, 4, 9]
    answers = rollout(lengths, [True] * 5 + [False])
    for share, learned in ((1.0, [4.5, 3.0, 1.5, -0.5, 2.5, -47.0]), (0.5, [4.75, 3.0, 1.25, -0.25, 2.25, -48.5])):
        group = {"samples_per_prompt": 3, "rollout_batch_size": 6, "num_mini_batches": 1}
        found, slope = learned_from(scores, answers, share=share, missing_eos_score=None, **group)
        assert found.tolist() == pytest.approx(learned)
        assert slope == pytest.approx(-0.5)
        assert scores.tolist() == [5.0, 3.0, 1.0, 0.0, 2.0, -50.0]  # what was scored is reported and compared


@pytest.mark.parametrize(("rule", "cut_off"), [("keep", 2.0), ("lower", 1.0), ("replace", -1.0)])
def test_running_into_the_limit_earns_nothing_where_only_length_is_scored(rule, cut_off):
    """Scores of 0.1 a token: without its length each answer is worth 2, the score of the mean length, of 20 tokens.

    Of the second prompt no answer ended. Its answers are equally long, so nothing is known of their length's share.
    """
    answers = rollout([10, 20, 30, 64, 64, 64, 64, 64], [True, True, True, *[False] * 5])
    group = {"samples_per_prompt": 4, "rollout_batch_size": 8}
    rules = {"keep": (None, None), "lower": (1.0, None), "replace": (None, -1.0)}
    settings = group | dict(zip(("missing_eos_penalty", "missing_eos_score"), rules[rule], strict=True))
    learned, _ = learned_from(0.1 * answers.lengths.float(), answers, **settings)
    assert learned[:4].tolist() == pytest.approx([2.0, 2.0, 2.0, cut_off], abs=1e-5)
    unknown = {"keep": 6.4, "lower": 5.4, "replace": -1.0}[rule]
    assert learned[4:].tolist() == pytest.approx([unknown] * 4, abs=1e-5)


def test_one_length_explains_nothing():
    assert length_slope(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]), torch.tensor([True, True]), 2) == 0.0
    assert length_slope(torch.tensor([1.0, 2.0]), torch.tensor([3, 4]), torch.tensor([True, False]), 2) == 0.0


def test_held_length_by_hand():
    """The first rollout has 4 tokens on average. At 3, a token is worth 0.5 * (1 - 3 / 4) = 0.125 within a prompt."""
    hold = HoldLength(0.5)
    hold.samples = 2
    first, second = rollout([4, 4, 3, 5], [True] * 4), rollout([2, 4, 3, 3], [True] * 4)
    signal = TrainingSignal(torch.tensor([1.0, 2.0, 3.0, 4.0]), {})
    assert hold.shape(signal, first, None).scores.tolist() == signal.scores.tolist()
    resumed = HoldLength(0.5)
    resumed.samples = 2
    resumed.load_state_dict(hold.state_dict())
    assert resumed.shape(signal, second, None).scores.tolist() == pytest.approx([0.875, 2.125, 3.0, 4.0])
    assert resumed.metrics() == {"reward/per_token": 0.125}
