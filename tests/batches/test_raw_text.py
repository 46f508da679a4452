import re

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.batches.raw_text import cut_into_pieces, infilling, mask_spans, pack, prefix, replace_spans, span_corruption

SENTINELS = list(range(1000, 1100))
MASK = 2000
IDS = st.lists(st.integers(0, 500), min_size=2, max_size=200)
SEEDS = st.integers(0, 2**32)


def random(seed):
    return numpy.random.default_rng(seed)


def put_back(source, target):
    """The text of T5's input and target."""
    spans, current = {}, None
    for token in target:
        if token in SENTINELS:
            current = spans[token] = []
        else:
            current.append(token)
    return [part for token in source for part in (spans[token] if token in SENTINELS else [token])]


def test_the_sentence_of_the_t5_paper():
    words = re.findall(r"\S+", "Thank you for inviting me to your party last week .")
    names = dict(zip(SENTINELS, ("<X>", "<Y>", "<Z>"), strict=False))
    source, target = replace_spans(range(len(words)), [(2, 4), (8, 9)], SENTINELS)
    said = [" ".join(names.get(token) or words[token] for token in ids) for ids in (source, target)]
    assert said == ["Thank you <X> me to your party <Y> week .", "<X> for inviting <Y> last <Z>"]


@given(IDS, SEEDS)
def test_span_corruption_gives_the_text_back(ids, seed):
    source, target = span_corruption(ids, SENTINELS, random(seed))
    assert put_back(source, target) == ids
    spans = [token for token in source if token in SENTINELS]
    assert target[-1] == SENTINELS[len(spans)]  # the next one ends the target
    taken = len(target) - len(spans) - 1
    assert taken == min(max(round(0.15 * len(ids)), 1), len(ids) - 1)
    assert len(spans) == min(max(round(taken / 3), 1), len(ids) - taken)
    assert source[0] not in SENTINELS  # T5 begins with text


def test_spans_have_a_mean_of_three_and_as_many_as_there_are_sentinels():
    lengths = []
    for seed in range(50):
        _, target = span_corruption(range(400), SENTINELS, random(seed))
        places = [n for n, token in enumerate(target) if token in SENTINELS]
        lengths += [after - before - 1 for before, after in zip(places, places[1:], strict=False)]
    assert numpy.mean(lengths) == pytest.approx(3.0)
    assert len(set(lengths)) > 5
    source, target = span_corruption(range(500), SENTINELS[:3], random(0))
    assert sum(token in SENTINELS for token in source) == 2
    assert put_back(source, target) == list(range(500))


def test_infilling_by_hand():
    """The sentence of figure 1 of the BART paper: ABC.DE., where one mask token replaces D.E and an empty span."""
    words = ["A", "B", "C", ".", "D", "E", "."]
    source, target = mask_spans(range(7), [(1, 3), (4, 4), (5, 6)], MASK)
    said = ["_" if token == MASK else words[token] for token in source]
    assert "".join(said) == "A_._D_."
    assert "".join(words[token] for token in target) == "ABC.DE."


@given(IDS, SEEDS)
def test_infilling_masks_30_percent_and_the_target_is_the_text(ids, seed):
    source, target = infilling(ids, MASK, random(seed))
    assert target == ids
    kept = [token for token in source if token != MASK]
    assert len(ids) - len(kept) == min(max(round(0.3 * len(ids)), 1), len(ids) - 1)
    rest = iter(ids)
    assert all(token in rest for token in kept), "the kept tokens stay in order"


def test_the_lengths_of_infilled_spans_are_poisson_distributed_with_mean_three():
    lengths = []
    for seed in range(200):
        ids = list(range(1000))
        source, _ = infilling(ids, MASK, random(seed))
        expected, empty = 0, 0
        for token in source:
            if token == MASK:
                empty += 1
                continue
            if empty == 1:
                lengths.append(token - expected)
            expected, empty = token + 1, 0
    assert len(lengths) > 10_000
    # Two spans that touch are left out: a mask token between two kept tokens is one span.
    assert numpy.mean(lengths) == pytest.approx(3.0, abs=0.1)
    assert numpy.var(lengths) == pytest.approx(3.0, abs=0.15), "the variance of a Poisson distribution is its mean"
    share_of_zeros = lengths.count(0) / len(lengths)
    assert share_of_zeros == pytest.approx(0.0498, abs=0.005)  # e^-3


@given(IDS, SEEDS)
def test_a_prefix_and_what_follows_are_the_text(ids, seed):
    source, target = prefix(ids, random(seed))
    assert source
    assert target
    assert source + target == ids


@given(st.lists(st.lists(st.integers(0, 9), max_size=30)), st.integers(1, 12))
def test_rows_are_full_and_hold_all_documents(documents, length):
    rows = pack(documents, 77, length)
    assert [token for row in rows for part in row.responses for token in part] == [
        token for ids in documents for token in ids
    ]
    assert all(row.prompt == [77] and all(row.responses) for row in rows)
    sizes = [sum(map(len, row.responses)) for row in rows]
    assert sizes[:-1] == [length] * len(sizes[:-1])
    assert not sizes or 0 < sizes[-1] <= length


def test_a_row_has_a_part_for_each_document():
    assert [row.responses for row in pack([[1, 2, 3], [4], [5, 6, 7]], 0, 5)] == [[[1, 2, 3], [4], [5]], [[6, 7]]]
    assert cut_into_pieces([[1, 2, 3, 4, 5], [6], [7, 8]], 2) == [[1, 2], [3, 4], [7, 8]]  # one token: nothing could be left
