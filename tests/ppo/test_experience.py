"""Which rows the minibatches of an update hold: reproducible, complete, shuffled."""

from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.experience import shuffled_minibatches

QUICK = settings(deadline=None, max_examples=40)


@QUICK
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_minibatches_are_a_partition_of_nearly_equal_parts(rows, parts, update, epoch):
    parts = min(parts, rows)
    found = shuffled_minibatches(rows, 1, parts, update, epoch, seed=0)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(rows))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@QUICK
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_samples_of_a_prompt_stay_in_one_minibatch(prompts, each, parts):
    found = shuffled_minibatches(prompts * each, each, min(parts, prompts), 1, 0, seed=0)
    assert sorted(row for part in found for row in part) == list(range(prompts * each))
    for part in found:
        groups = [part[i : i + each] for i in range(0, len(part), each)]
        assert groups == [list(range(first, first + each)) for first in part[::each]]


def test_minibatches_are_reshuffled_each_epoch_and_update():
    found = [shuffled_minibatches(64, 1, 2, update, epoch, seed=0) for update in (1, 2) for epoch in (0, 1)]
    assert all(found[i] != found[j] for i in range(4) for j in range(i))
    assert shuffled_minibatches(64, 1, 2, 1, 0, seed=0) == found[0]
