from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.batches.mixtures import MixedExamples, Mixture, encode_mixture
from align.core.errors import UserError
from align.core.seeds import RngStream, generator
from align.tokenization.encoded import EncodedDemonstration, EncodedRanking
from align.training.data_order import DataOrder


def order_of(
    seed: int,
    batch_size: int,
    sizes: list[int],
    weights: Sequence[float] = (1.0,),
    cap: int = 0,
    temperature: float = 1.0,
) -> DataOrder[int]:
    """The order of as many numbers as the sources have examples."""
    return DataOrder(MixedExamples(list(range(sum(sizes))), sizes, list(weights)), seed, batch_size, cap, temperature)


def epoch_of(epochs: DataOrder[int], number: int) -> list[int]:
    count = epochs.updates_per_epoch
    return [row for update in range(number * count + 1, (number + 1) * count + 1) for row in epochs.rows(update)]


@pytest.mark.parametrize(
    "change", [{"ranks": [2, 1]}, {"margin": 0.5}, {"preferences": ((0, 0.9), (0.1, 0))}, {"loss_mask": [False]}]
)
def test_a_checkpoint_with_other_labels_is_refused(change):
    first = EncodedRanking([1], [[2], [3]], [1, 2])
    if "loss_mask" in change:
        first = EncodedDemonstration([1], [2], [True])
    before, after = (DataOrder(MixedExamples([each], [1], [1.0]), 0, 1) for each in (first, replace(first, **change)))
    before.load_state_dict(before.state_dict())
    with pytest.raises(UserError, match=r"are not those that this run began with \(others, other labels"):
        after.load_state_dict(before.state_dict())
    older = {name: value for name, value in before.state_dict().items() if name != "labels"}
    after.load_state_dict(older)  # of a checkpoint without a digest of labels


def test_an_epoch_is_one_permutation_of_one_source_or_of_two_without_rates():
    epochs = order_of(7, 4, [10])
    assert epochs.updates_per_epoch == 3
    for number in range(3):
        assert epoch_of(epochs, number) == generator(7, RngStream.DATA_ORDER, number).permutation(10).tolist()
    assert [len(epochs.rows(update)) for update in (1, 2, 3, 4)] == [4, 4, 2, 4]
    apart, together = order_of(3, 8, [5, 12], [1.0, 1.0]), order_of(3, 8, [17])
    assert [apart.rows(update) for update in range(1, 10)] == [together.rows(update) for update in range(1, 10)]


@pytest.mark.parametrize(
    ("sizes", "weights", "cap", "temperature", "counts"),
    [
        ([100, 300], [1, 1], 0, 1, [100, 300]),
        ([100, 300], [3, 1], 0, 1, [200, 200]),  # 300 : 300
        ([100, 300], [1, 1], 100, 1, [200, 200]),  # min(300, 100): equal rates
        ([100, 400], [1, 1], 0, 2, [167, 333]),  # 10 : 20 of 500
        ([10, 990], [1, 1], 0, 1e6, [500, 500]),
        ([3, 3, 3], [1, 1, 2], 0, 1, [2, 2, 5]),  # 2.25, 2.25, 4.5: one is left over, and 0.5 is the largest rest
    ],
)
def test_rates_by_hand(sizes, weights, cap, temperature, counts):
    assert order_of(0, 8, sizes, weights, cap, temperature).counts == counts


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
    cap=st.sampled_from([0, 5]),
    epochs=st.integers(1, 5),
)
def test_a_source_is_seen_evenly_over_any_number_of_epochs(sizes, weight, cap, epochs):
    weights = [weight] + [1.0] * (len(sizes) - 1)
    try:
        order = order_of(1, 7, sizes, weights, cap)
    except UserError:
        return  # a source without an example
    assert sum(order.counts) == sum(sizes)
    seen = Counter(row for number in range(epochs) for row in epoch_of(order, number))
    first = 0
    for size, count in zip(sizes, order.counts, strict=True):
        times = [seen[row] for row in range(first, first + size)]
        assert sum(times) == epochs * count
        assert max(times) - min(times) <= 1
        first += size


def test_a_source_that_would_never_be_seen_is_refused():
    with pytest.raises(UserError, match=r"source 1 of the training data would have none of an epoch's 1001 examples"):
        order_of(0, 8, [1, 1000], [0.01, 1.0])


def test_names_in_one_setting_and_sources_in_memory_are_the_same_mixture(tmp_path):
    odd = tmp_path / "a, b=3.jsonl"
    odd.write_text("{}")
    read = lambda data: [data]  # noqa: E731
    assert encode_mixture("a.jsonl, b.jsonl=2.5", read) == (["a.jsonl", "b.jsonl"], [1, 1], [1.0, 2.5])
    assert encode_mixture(Mixture(["a.jsonl", "b.jsonl"], [1.0, 2.5]), read)[1:] == ([1, 1], [1.0, 2.5])
    assert encode_mixture([{"prompt": "Hi"}], lambda data: list(data)) == ([{"prompt": "Hi"}], [1], [1.0])
    assert encode_mixture(str(odd), read) == ([str(odd)], [1], [1.0])
    assert encode_mixture("key=value", read)[0] == ["key=value"]
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(UserError, match=f"b={weight}: source weights"):
            encode_mixture(f"a, b={weight}", read)
