"""Raw text as examples: what is taken out comes back, documents are cut nowhere but at full rows, and T5's own sentence."""

import re

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.batches.texts import Denoising, cut_into_pieces, infilling, mass, pack, prefix, replace_spans, span_corruption

SENTINELS = list(range(1000, 1100))
MASK = 999
DENOISING = Denoising(SENTINELS, MASK)
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
    source, target = span_corruption(ids, DENOISING, random(seed))
    assert put_back(source, target) == ids
    spans = [token for token in source if token in SENTINELS]
    assert target[-1] == SENTINELS[len(spans)]  # the next one ends the target
    taken = len(target) - len(spans) - 1
    assert taken == min(max(round(0.15 * len(ids)), 1), len(ids) - 1)
    assert len(spans) == min(max(round(taken / 3), 1), len(ids) - taken)
    assert source[0] not in SENTINELS  # T5 begins with text


def test_few_sentinels_make_few_spans():
    source, target = span_corruption(range(500), Denoising(SENTINELS[:3], MASK), random(0))
    assert sum(token in SENTINELS for token in source) == 2
    assert put_back(source, target) == list(range(500))


def test_spans_have_a_mean_of_three():
    lengths = []
    for seed in range(50):
        _, target = span_corruption(range(400), DENOISING, random(seed))
        places = [n for n, token in enumerate(target) if token in SENTINELS]
        lengths += [after - before - 1 for before, after in zip(places, places[1:], strict=False)]
    assert numpy.mean(lengths) == pytest.approx(3.0)
    assert len(set(lengths)) > 5


@given(IDS, SEEDS)
def test_infilling_keeps_the_order_and_learns_the_text(ids, seed):
    source, target = infilling(ids, DENOISING, random(seed))
    assert target == ids
    kept = [token for token in source if token != MASK]
    assert len(ids) - len(kept) == round(0.3 * len(ids))
    rest = iter(ids)
    assert all(token in rest for token in kept)  # a subsequence


@given(IDS, SEEDS, st.data())
def test_infilling_shuffles_sentences_whole(ids, seed, data):
    numbered = list(range(len(ids)))  # each token says where it was
    ends = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=5)))
    source, _ = infilling(numbered, DENOISING, random(seed), ends)
    kept = [token for token in source if token != MASK]
    assert len(numbered) - len(kept) == round(0.3 * len(ids))
    assert len(set(kept)) == len(kept)
    sentence = [sum(token >= end for end in ends) for token in kept]
    changes = sum(before != after for before, after in zip(sentence, sentence[1:], strict=False))
    assert changes <= max(len(set(sentence)) - 1, 0)  # no sentence is torn apart
    for number in set(sentence):
        own = [token for token, of in zip(kept, sentence, strict=True) if of == number]
        assert own == sorted(own)


def test_infilling_inserts_masks_of_length_0_and_shuffles():
    sources = [infilling(range(10, 50), DENOISING, random(seed), [20])[0] for seed in range(60)]
    masks = [source.count(MASK) for source in sources]
    # 12 tokens go in spans of Poisson(3): about 4, of which one in twenty takes nothing.
    assert 3.5 < numpy.mean(masks) < 6
    first = [next(token for token in source if token != MASK) for source in sources]
    assert 0.3 < numpy.mean([token >= 30 for token in first]) < 0.7


def test_infilled_spans_have_a_mean_of_three():
    """600 of 2,000 tokens go, the last span is cut short: 600 tokens in N spans, over 40 texts 600 / N is 3 within 2 %."""
    masks = [infilling([5] * 2000, DENOISING, random(seed))[0].count(MASK) for seed in range(40)]
    assert 600 / numpy.mean(masks) == pytest.approx(3.0, rel=0.02)


@given(IDS, SEEDS)
def test_mass_takes_one_span_of_half(ids, seed):
    source, target = mass(ids, DENOISING, random(seed))
    start, length = source.index(MASK), len(target)
    assert length == max(1, round(len(ids) / 2))
    assert source[start : start + length] == [MASK] * length
    assert source[:start] + target + source[start + length :] == ids


@given(IDS, SEEDS)
def test_a_prefix_and_what_follows_are_the_text(ids, seed):
    source, target = prefix(ids, DENOISING, random(seed))
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
