"""Passes over training data: one source as ever, several by T5's rates, each example of a source as often as any other."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.batches.mixtures import Mixture, encode_mixture
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.settings import MixtureConfig
from align.sft.train import SFTConfig
from align.training.epochs import Epochs, parse_ramp


def epoch_of(epochs: Epochs, number: int) -> list[int]:
    count = epochs.updates_per_epoch
    return [row for update in range(number * count + 1, (number + 1) * count + 1) for row in epochs.rows(update)]


def test_an_epoch_of_one_source_is_one_permutation_cut_into_batches():
    epochs = Epochs(7, 4, [10])
    assert epochs.updates_per_epoch == 3
    for number in range(3):
        assert epoch_of(epochs, number) == generator(7, Stream.DATA_ORDER, number).permutation(10).tolist()
    assert [len(epochs.rows(update)) for update in (1, 2, 3, 4)] == [4, 4, 2, 4]


def test_two_sources_without_rates_are_one_that_is_as_long_as_both():
    apart, together = Epochs(3, 8, [5, 12], [1.0, 1.0]), Epochs(3, 8, [17])
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
    mixing = MixtureConfig(mixing_cap=cap, mixing_temperature=temperature)
    assert Epochs(0, 8, sizes, weights, mixing).counts == counts


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
        order = Epochs(1, 7, sizes, weights, MixtureConfig(mixing_cap=cap))
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
        Epochs(0, 8, [1, 1000], [0.01, 1.0])


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
        with pytest.raises(UserError, match=f"b={weight}: the weight of a source must be a number above 0"):
            encode_mixture(f"a, b={weight}", read)


# --------------------------------------------------------------------------------------------------- a ramp of batch sizes


def test_a_ramp_by_hand():
    """10 examples: 2, 2, 3, 3, then batches of 4: 4, 4, 2 an epoch."""
    epochs = Epochs(5, 4, [10], ramp=[(2, 2), (3, 2)])
    assert [len(epochs.rows(update)) for update in range(1, 11)] == [2, 2, 3, 3, 4, 4, 2, 4, 4, 2]
    assert [epochs.updates(count) for count in (1, 2, 3)] == [4, 7, 10]


@settings(deadline=None, max_examples=60)
@given(examples=st.integers(1, 30), first=st.integers(1, 3), lasts=st.integers(1, 12), count=st.integers(1, 4))
def test_an_epoch_has_every_example_once_with_a_ramp_too(examples, first, lasts, count):
    epochs = Epochs(1, 5, [examples], ramp=[(first, lasts), (4, 3)])
    rows = [epochs.rows(update) for update in range(1, epochs.updates(count) + 1)]
    seen = Counter(row for batch in rows for row in batch)
    assert seen == dict.fromkeys(range(examples), count)
    sizes = [len(batch) for batch in rows[:lasts]]
    assert all(size <= first for size in sizes)


def test_no_ramp_is_as_ever():
    plain, none = Epochs(3, 8, [21]), Epochs(3, 8, [21], ramp=parse_ramp([]))
    assert [plain.rows(update) for update in range(1, 10)] == [none.rows(update) for update in range(1, 10)]
    assert plain.updates(4) == 12


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["8"], "batch_ramp: '8' must be SIZE:UPDATES"),
        (["0:5"], "'0:5' must be"),
        (["16:5", "8:5"], "sizes that rise"),
        (["32:5"], "stay below batch_size"),
    ],
)
def test_a_wrong_ramp_is_one_line(words, complaint):
    with pytest.raises(UserError, match=complaint):
        SFTConfig(batch_size=32, batch_ramp=words)
