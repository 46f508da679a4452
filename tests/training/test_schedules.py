from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.batches.micro_batches import MicroBatch, micro_batches
from align.sft import SFTConfig
from align.training.optimizer import ParamGroup, learning_rate

QUICK = settings(deadline=None, max_examples=40)


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


def test_a_group_rests_and_then_runs_through_its_whole_schedule():
    group = ParamGroup("value", frozenset({"w"}), peak=4.0, frozen_steps=2)
    config = SFTConfig(learning_rate=1.0, lr_scheduler_type="linear", warmup_ratio=0.0)
    # Frozen for 2 of 6 steps; then the 4 that are left fall from the peak to a quarter of it.
    assert [group.rate(config, step, 6) for step in range(1, 7)] == [0.0, 0.0, 4.0, 3.0, 2.0, 1.0]
    assert group.metric == "learning_rate/value"


class Process:
    """What micro-batches ask of an Accelerator."""

    def __init__(self, rank, count):
        self.process_index, self.num_processes, self.device = rank, count, SimpleNamespace(type="cpu")


def processes(count):
    return [Process(rank, count) for rank in range(count)]


def test_micro_batches_by_hand():
    # Lengths by row: 40: 3, 41: 10, 42: 5, 43: 4. Two processes take turns from the longest: 41, 43 and 42, 40.
    plans = [micro_batches([40, 41, 42, 43], [3, 10, 5, 4], 10, process) for process in processes(2)]
    assert plans[0] == [MicroBatch([41], 1.0), MicroBatch([43], 1.0)]
    assert plans[1] == [MicroBatch([42, 40], 1.0), MicroBatch([40], 0.0)]  # a filler with the shortest row
    # Beside a row of 100 tokens, one of 70 brings 30 of padding; the next one would bring it to 65, above 64 on a CPU.
    (alone,) = processes(1)
    assert micro_batches([0, 1, 2], [100, 70, 65], 1000, alone) == [MicroBatch([0, 1], 1.0), MicroBatch([2], 1.0)]
    assert micro_batches([0, 1, 2], [100, 70, 66], 1000, alone) == [MicroBatch([0, 1, 2], 1.0)]


@QUICK
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 120), st.integers(1, 5))
def test_micro_batches_share_out_every_row_once_and_keep_processes_in_step(lengths, budget, world):
    rows = [100 + i for i in range(len(lengths))]
    plans = [micro_batches(rows, lengths, budget, process) for process in processes(world)]
    assert len({len(plan) for plan in plans}) == 1
    real = [row for plan in plans for batch in plan if batch.loss_weight == 1.0 for row in batch.rows]
    assert sorted(real) == rows
    assert all(batch.loss_weight in (0.0, 1.0) and batch.rows for plan in plans for batch in plan)
    for plan in plans:
        for batch in plan:
            assert len(batch.rows) == 1 or len(batch.rows) * max(lengths[row - 100] for row in batch.rows) <= budget
