"""Any record comes back from the row that it is written as."""

import json
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from align.data.records import Demonstration, Prompt, Ranking, RuleJudgment

from .rows import assistant, system, user

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda text: text.strip() != "")
NAMES = st.text(string.ascii_letters, min_size=1, max_size=8)
LABELS = {"id": st.none() | NAMES, "category": st.none() | NAMES}


@st.composite
def prompts(draw):
    first = [system(draw(st.just("") | TEXTS))] if draw(st.booleans()) else []
    texts = draw(st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1))
    return (*first, *(assistant(text) if i % 2 else user(text) for i, text in enumerate(texts)))


@st.composite
def continuations(draw):
    texts = draw(st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1))
    return tuple(user(text) if i % 2 else assistant(text) for i, text in enumerate(texts))


@st.composite
def preferences(draw, count):
    """Probabilities [count, count] of which (i, j) and (j, i) are at most 1 together."""
    shares = draw(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=count**2, max_size=count**2))
    matrix = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            sure, first = shares[i * count + j]
            matrix[i][j], matrix[j][i] = sure * first, sure * (1 - first)
    return tuple(map(tuple, matrix))


@st.composite
def rankings(draw):
    responses = tuple(draw(st.lists(TEXTS, min_size=2, max_size=9, unique=True)))
    count = len(responses)

    def each(values):
        return st.tuples(*[values] * count)

    flags = st.none() | st.lists(NAMES, max_size=3).map(tuple) | each(st.lists(NAMES, max_size=2).map(tuple))
    return Ranking(
        prompt=draw(prompts()),
        responses=responses,
        ranks=draw(each(st.integers(1, 12)).filter(lambda ranks: len(set(ranks)) > 1)),
        preferences=draw(st.none() | preferences(count)),
        margin=draw(st.none() | st.floats(0, 1e9)) if count == 2 else None,
        labeler=draw(st.none() | NAMES),
        ratings=draw(st.none() | each(st.integers(1, 7))),
        flags=draw(flags),
        model=draw(st.none() | each(NAMES)),
        **{name: draw(values) for name, values in LABELS.items()},
    )


RECORDS = (
    st.builds(Demonstration, prompt=prompts(), continuation=continuations(), **LABELS)
    | rankings()
    | st.builds(Prompt, prompt=prompts(), **LABELS)
    | st.builds(
        RuleJudgment,
        prompt=prompts(),
        response=TEXTS,
        rule=NAMES,
        verdict=st.sampled_from(["violates", "unsure", "follows"]),
        labeler=st.none() | NAMES,
        note=st.none() | st.just("") | TEXTS,
        **LABELS,
    )
)


@settings(max_examples=200, deadline=None)
@given(RECORDS)
def test_a_record_comes_back_from_its_row_as_it_was(record):
    row = json.loads(json.dumps(record.to_row()))
    assert type(record).from_row(row) == record
    assert None not in row.values()
