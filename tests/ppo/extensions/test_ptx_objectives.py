import re

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.ppo.extensions.ptx import cut_into_pieces, pack, prefix, replace_spans, span_corruption

SENTINELS = list(range(1000, 1100))
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
