import pytest

from align.sft import SFTConfig
from align.training.optimizer import ParamGroup, learning_rate


@pytest.mark.parametrize(
    ("schedule", "update", "expected"),
    [
        # 10 updates, 2 of them warm-up: 1/2, 1; then the share of decay that is done is (update - 3) / 8.
        ("cosine", 1, 0.5),
        ("cosine", 2, 1.0),
        ("cosine", 3, 1.0),
        ("cosine", 7, 0.5),  # (1 + cos(pi / 2)) / 2
        ("cosine", 10, 0.0380602),  # (1 + cos(7 pi / 8)) / 2 = (1 - .9238795) / 2
        ("linear", 1, 0.5),
        ("linear", 7, 0.5),
        ("linear", 10, 0.125),
        ("inverse_sqrt", 1, 0.5),
        ("inverse_sqrt", 8, 0.5),  # sqrt(2 / 8)
        ("truncated_rsqrt", 1, 1.0),  # constant through update 2: sqrt(2 / max(n, 2))
        ("truncated_rsqrt", 2, 1.0),
        ("truncated_rsqrt", 3, 0.8164966),  # sqrt(2 / 3)
        ("truncated_rsqrt", 8, 0.5),
        ("constant", 1, 0.5),
        ("constant", 10, 1.0),
    ],
)
def test_schedules_by_hand(schedule, update, expected):
    config = SFTConfig(learning_rate=2e-3, lr_scheduler_type=schedule, warmup_ratio=0.2)
    assert learning_rate(config, update, 10, 2e-3) == pytest.approx(2e-3 * expected, rel=1e-6)
    at_once = SFTConfig(learning_rate=1.0, lr_scheduler_type=schedule, warmup_ratio=0.0)
    assert learning_rate(at_once, 1, 10, 1.0) == 1.0, "without warm-up it starts at the peak"
    seven_percent = SFTConfig(learning_rate=1.0, lr_scheduler_type="constant", warmup_ratio=0.07)
    assert learning_rate(seven_percent, 7, 100, 1.0) == 1.0, "7 of 100 updates"


def test_t5s_schedule_of_pretraining():
    """1/sqrt(max(n, k)) with k = 10,000 (Raffel et al. 2020, section 3.1.2): 0.01 until k, and 1/sqrt(n) after it."""
    steps = 2**19
    config = SFTConfig(learning_rate=0.01, lr_scheduler_type="truncated_rsqrt", warmup_ratio=10_000 / steps)
    for step, expected in ((1, 0.01), (10_000, 0.01), (40_000, 0.005), (250_000, 0.002), (steps, 0.0013810679)):
        assert learning_rate(config, step, steps, 0.01) == pytest.approx(expected, rel=1e-6), step


def test_a_group_rests_and_then_runs_through_its_whole_schedule():
    group = ParamGroup("value", frozenset({"w"}), peak=4.0, frozen_steps=2)
    config = SFTConfig(learning_rate=1.0, lr_scheduler_type="linear", warmup_ratio=0.0)
    # Frozen for 2 of 6 steps; then the 4 that are left fall from the peak to a quarter of it.
    assert [group.rate(config, step, 6) for step in range(1, 7)] == [0.0, 0.0, 4.0, 3.0, 2.0, 1.0]
    assert group.metric == "learning_rate/value"
