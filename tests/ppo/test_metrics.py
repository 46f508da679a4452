import pytest
import torch

from align.core.errors import UserError
from align.ppo import PPOTrainer
from align.ppo.metrics import (
    COLLAPSE_PATIENCE,
    CRITIC_PATIENCE,
    PATIENCE,
    CollapseWatch,
    DriftWatch,
    MissingEosWatch,
    NegativeKLWatch,
    check_ratio,
    repetition,
    value_metrics,
)
from align.ppo.records import Experience, RoleOutputs, Rollout, TrainingSignal
from align.tokenization.encoded import EncodedPrompt

NEGATIVE, POSITIVE = torch.tensor([-1.0, -1.2, -0.8, -1.0]), torch.tensor([1.0, 1.2, 0.8, 1.0])
FIRST = {"reward": 1.0, "length": 100.0, "repetition": 0.05, "eos_rate": 0.9}


def test_a_kl_that_stays_negative_stops_the_run_and_one_update_above_zero_starts_the_count_again():
    watch = NegativeKLWatch()
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            watch.check(NEGATIVE)
        watch.check(POSITIVE)
    assert watch.count == 0
    for _ in range(PATIENCE - 1):
        watch.check(NEGATIVE)
    with pytest.raises(UserError, match=r"negative 5 updates in a row \(now -1\.000\).*not sampled from the distribution"):
        watch.check(NEGATIVE)


@pytest.mark.parametrize(
    ("kl", "counts"),
    [
        # Standard deviation 1, error 1 / sqrt(4) = .5; the mean must be below -2 x .5 - .001 = -1.001.
        ([-2.1, -0.1, -2.1, -0.1], True),  # mean -1.1
        ([-1.9, 0.1, -1.9, 0.1], False),  # mean -.9
        ([-0.0005] * 4, False),  # rounding, not a sign
        ([-0.002] * 4, True),
        ([0.0] * 4, False),
        ([-5.0], True),
    ],
)
def test_only_a_mean_clearly_below_zero_counts(kl, counts):
    watch = NegativeKLWatch()
    watch.check(torch.tensor(kl))
    assert watch.count == int(counts)


@pytest.mark.parametrize(
    ("more", "rewarded"),
    [
        ({}, True),
        ({"missing_eos_penalty": 1.0}, False),
        ({"missing_eos_score": -9.0}, False),
    ],
)
def test_a_replacement_above_the_scores_of_complete_responses_is_named_once(more, rewarded, make_config, capsys):
    """A reward model without a level: all scores are -6, and a response that is cut off gets -1."""

    def level(prompts, responses):
        return [-6.0] * len(responses)

    settings = {"rollout_batch_size": 64, "max_new_tokens": 12, "total_updates": 2, "num_ppo_epochs": 1}
    config = make_config(learning_rate=1e-6, **settings, **more)
    PPOTrainer("tiny-gpt2", [level], ["red", "green"], config).train()
    printed = " ".join(capsys.readouterr().err.split())
    said = "warning: responses that end have a mean score of -6, and one that does not gets -1 (missing_eos_score)"
    assert printed.count(said) == printed.count("running into the limit") == int(rewarded)


def drift(**changes):
    watch = DriftWatch(FIRST)
    return watch.check({**FIRST, "reward": 2.0, **changes})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"length": 151.0}, "from 100 to 151 tokens"),
        ({"length": 49.0}, "from 100 to 49 tokens"),
        ({"repetition": 0.16}, "repeated trigrams went from 5% to 16%"),
        ({"eos_rate": 0.69}, "end by themselves went from 90% to 69%"),
    ],
)
def test_warns_where_reward_rose_and_the_text_got_worse(changes, word):
    (said,) = drift(**changes)
    assert word in said
    assert drift(**changes, reward=1.0) == [], "no warning where the reward did not rise"
    assert len(drift(length=200.0, repetition=0.5, eos_rate=0.1)) == 3


@pytest.mark.parametrize(
    "changes", [{}, {"length": 149.0}, {"length": 51.0}, {"repetition": 0.14}, {"eos_rate": 0.71}, {"eos_rate": 1.0}]
)
def test_small_changes_are_nothing_to_warn_of(changes):
    assert drift(**changes) == []


def test_the_first_evaluation_is_what_the_rest_is_compared_with_and_survives_a_resume():
    watch = DriftWatch()
    assert watch.state_dict() is None
    assert watch.check(FIRST) == []
    metrics = {**FIRST, "reward": 2.0, "length": 130.0}
    assert watch.check(metrics) == []
    resumed = DriftWatch(watch.state_dict())
    later = {**FIRST, "reward": 3.0, "length": 160.0}  # 1.6 times the first, though only 1.23 times the second
    assert resumed.check(later) == watch.check(later) == ["responses went from 100 to 160 tokens"]
    watch = DriftWatch({**FIRST, "length": 0.0})
    assert watch.check({**FIRST, "reward": 2.0, "length": 10.0}) == ["responses went from 0 to 10 tokens"]


def test_a_true_kl_near_zero_does_not_stop_a_run():
    watch, rng = NegativeKLWatch(), torch.Generator().manual_seed(0)
    for _ in range(2000):
        watch.check(torch.randn(64, generator=rng) * 0.1)


def test_scores_of_responses_without_an_end_are_compared_and_named_once():
    watch = MissingEosWatch(-1.0)
    assert watch.check(torch.tensor([-1.0, -1.0]), torch.tensor([False, False])) == ""
    assert "mean score of -3" in watch.check(torch.tensor([-3.0, -1.0]), torch.tensor([True, False]))
    assert watch.check(torch.tensor([-3.0, -1.0]), torch.tensor([True, False])) == ""
    nothing_ends = (torch.tensor([-1.0, -1.0]), torch.tensor([False, False]))
    watch = MissingEosWatch(-1.0)
    lines = [watch.check(*nothing_ends) for _ in range(5)]
    assert [bool(line) for line in lines] == [False, False, True, False, False]
    assert "no response ended in 3 updates: each score is -1, whatever the reward (missing_eos_score)" in lines[2]
    some_end = MissingEosWatch(-1.0)
    assert some_end.check(torch.tensor([2.0, -1.0]), torch.tensor([True, False])) == ""
    assert not any(some_end.check(*nothing_ends) for _ in range(5))
    assert not any(MissingEosWatch(None).check(*nothing_ends) for _ in range(5))


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2], 0.0),
        ([1, 2, 3, 4], 0.0),
        ([1, 1, 1, 1], 0.5),  # two trigrams, one of them new
        ([1, 2, 3, 1, 2, 3], 0.25),  # 123 231 312 123: one of four occurred before
    ],
)
def test_repetition_by_hand(ids, share):
    assert repetition(ids) == share


@pytest.mark.parametrize(
    ("device", "error", "outcome"),
    [
        ("cpu", 9e-5, ""),
        ("cpu", 2e-4, "stops"),
        ("cuda", 9e-4, ""),
        ("cuda", 2e-3, "warns"),
        ("cuda", 0.049, "warns"),
        ("cuda", 0.06, "stops"),
        ("cuda", float("nan"), "stops"),
        ("cpu", float("nan"), "stops"),
    ],
)
def test_the_ratio_check_is_exact_where_kernels_are_and_warns_where_they_are_not(device, error, outcome):
    if outcome == "stops":
        with pytest.raises(UserError, match="the ratio at the first minibatch of a fresh rollout is off by"):
            check_ratio(error, torch.device(device))
    else:
        assert bool(check_ratio(error, torch.device(device))) == (outcome == "warns")


def update(kl=0.1, explained=0.5):
    return {"kl/k1": kl, "value/explained_variance": explained}


def test_a_policy_that_has_lost_its_reward_stops_the_run_with_the_drop_and_may_recover_before():
    watch = CollapseWatch()
    good, bad = torch.tensor([2.0, 1.0, 2.0, 1.0]), torch.tensor([-1.0, -2.0, -1.0, -2.0])
    # Errors .577 / 2 = .289 each, together .408; the drop of 3 is above 4 x .408 = 1.63, one of 1.5 is not.
    assert watch.check(update(), good, 1) == []
    assert watch.check(update(), good - 1.5, 1) == []
    (warning,) = watch.check(update(), bad, 1)
    assert "from 1.5 to -1.5" in warning
    assert [watch.check(update(), bad, 1) for _ in range(COLLAPSE_PATIENCE - 2)] == [[]] * (COLLAPSE_PATIENCE - 2)
    assert watch.check(update(), good, 1) == []  # recovered: the count starts again
    for _ in range(COLLAPSE_PATIENCE - 1):
        watch.check(update(), bad, 1)
    resumed = CollapseWatch()
    resumed.load_state_dict(watch.state_dict())
    with pytest.raises(UserError, match=rf"-1\.5.*{COLLAPSE_PATIENCE} updates"):
        resumed.check(update(), bad, 1)


def test_a_watch_that_does_not_stop_only_warns_and_equal_samples_of_a_prompt_are_one_measurement():
    watch = CollapseWatch(stops=False)
    watch.check(update(), torch.ones(4), 2)
    for _ in range(2 * COLLAPSE_PATIENCE):
        watch.check(update(), torch.tensor([0.0, 0.0, 0.5, 0.5]), 2)
    assert watch.worse == 0  # means 0 and .5 of two prompts: error .25, and the drop of .75 is within 4 x .25
    for _ in range(2 * COLLAPSE_PATIENCE):
        watch.check(update(), torch.full((4,), -1.0), 2)
    assert watch.worse == 2 * COLLAPSE_PATIENCE


@pytest.mark.parametrize(
    ("metrics", "scores", "sign"),
    [
        (update(explained=-0.2), torch.tensor([1.0, 2.0]), "explained variance"),
        (update(), torch.tensor([1.0, 1.0]), "alike"),
        (update(), torch.tensor([-250.0, -250.001]), "alike"),
    ],
)
def test_signs_that_last_are_named_once(metrics, scores, sign):
    watch = CollapseWatch()
    lines = [watch.check(metrics, scores, 1) for _ in range(CRITIC_PATIENCE + 3)]
    assert [len(line) for line in lines] == [0] * (CRITIC_PATIENCE - 1) + [1] + [0] * 3
    assert sign in lines[CRITIC_PATIENCE - 1][0]


def test_one_update_that_moves_the_policy_far_is_named():
    watch = CollapseWatch()
    scores = torch.tensor([1.0, 2.0])
    assert [watch.check(update(kl), scores, 1) for kl in (0.0, 1.9, 3.8)] == [[]] * 3
    (warning,) = watch.check(update(5.9), scores, 1)
    assert "2.1 nats" in warning


def test_value_metrics_by_hand():
    """Returns 1 and 3, values 1 and 2: residual (0 + 1) / 2, variance 1; the line of returns over values has slope 2."""
    nothing = torch.zeros(2, 1)
    old = RoleOutputs(nothing, nothing, torch.tensor([[1.0], [2.0]]), nothing)
    rollout = Rollout([EncodedPrompt((), [1])] * 2, [[7], [7]], [True, True], ["x", "x"])
    signal = TrainingSignal(nothing[:, 0], {})
    experience = Experience(rollout, nothing[:, 0], signal, old, nothing, torch.tensor([[1.0], [3.0]]), 0.0)
    metrics = value_metrics(experience)
    assert metrics == pytest.approx({"value/loss": 0.25, "value/explained_variance": 0.5, "value/calibration": 2.0})
