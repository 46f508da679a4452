"""Any text through any writer and back is the same record."""

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from align.data import AttributeJudgment, Demonstration, Prompt, Ranking, RuleJudgment, read_records, write_records
from align.data.conversation import to_json, unambiguous, user_turn
from align.data.formats import convert_row
from annotation_ui.reports.row_files import to_jsonl, to_parquet
from tests.data.rows import assistant, system, user

PIECES = [
    *(
        "Human:",
        "Assistant:",
        "\n\nHuman: ",
        "\n\nAssistant: ",
        "\r\n\r\nHuman:",
        "\n",
        " ",
        "Hi",
        "ä\u2028",
        "\r",
        "\0",
        "\ufeff",
    ),
    *(
        "<extra_id_1>User\n",
        "<extra_id_1>Assistant\n",
        '[{"role": "user", "content": "x"}]',
        "[",
        "]",
        '"',
        "\\",
        "<|im_end|>",
    ),
    *(
        "[{'from': 'human', 'value': 'x'}]",
        "Human: a\n\nAssistant: b\n\nHuman: c",
        "\n\nHuman: a\n\nAssistant:",
        "null",
        "{}",
    ),
]
TEXTS = (
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
    | st.text(st.characters(codec="utf-8"), min_size=1)
).filter(lambda text: text.strip() != "")
LABELS = {"id": st.none() | TEXTS, "category": st.none() | TEXTS}


@st.composite
def conversations(draw, ends_with):
    """Turns in alternation that end with the user's or the assistant's."""
    texts = draw(st.lists(TEXTS, min_size=1, max_size=3))
    others = {user: assistant, assistant: user}
    turns, turn = [], ends_with
    for text in texts:
        turns.insert(0, turn(text))
        turn = others[turn]
    if turns[0]["role"] == "assistant" and ends_with is user:
        turns.insert(0, user(draw(TEXTS)))
    if turns[0]["role"] == "user" and ends_with is assistant:
        turns = turns[1:] or [assistant(draw(TEXTS))]
    before = draw(st.none() | TEXTS) if ends_with is user else None
    return tuple([system(before), *turns] if before else turns)


@st.composite
def rankings(draw):
    responses = tuple(draw(st.lists(TEXTS, min_size=2, max_size=4, unique=True)))
    count = len(responses)
    return Ranking(
        prompt=draw(conversations(user)),
        responses=responses,
        ranks=tuple(draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))),
        labeler=draw(st.none() | TEXTS),
        finish_reason=draw(st.none() | st.tuples(*[st.sampled_from(["stop", "length"])] * count)),
        model=draw(st.none() | st.tuples(*[TEXTS] * count)),
        **{name: draw(values) for name, values in LABELS.items()},
    )


REASONS = st.sampled_from([None, "stop", "length"])
RECORDS = {
    Demonstration: st.builds(
        Demonstration, prompt=conversations(user), continuation=conversations(assistant), finish_reason=REASONS, **LABELS
    ),
    Ranking: rankings(),
    Prompt: st.builds(Prompt, prompt=conversations(user), ids=st.none() | st.just((5, 6)), **LABELS),
    RuleJudgment: st.builds(
        RuleJudgment,
        prompt=conversations(user),
        response=TEXTS | st.just(""),
        rule=TEXTS,
        verdict=st.sampled_from(["violates", "unsure", "follows"]),
        note=st.none() | TEXTS,
        **LABELS,
    ),
    AttributeJudgment: st.builds(
        AttributeJudgment,
        prompt=conversations(user),
        response=TEXTS,
        attributes=st.dictionaries(TEXTS, st.floats(-9, 9), min_size=1),
        **LABELS,
    ),
}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(list(RECORDS)), st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_a_record_is_read_as_it_was_written(data, kind, ending):
    records = data.draw(st.lists(RECORDS[kind], min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{ending}"
        write_records(path, records)
        assert read_records(path, kind, token_ids=True) == records


@settings(max_examples=100, deadline=None)
@given(TEXTS)
@example("\n\nHuman: Write a dialogue.\n\nAssistant:")
@example("Human: 1\n\nAssistant: 2\n\nHuman: 3")
@example('[{"role": "user", "content": "x"}]')
def test_rows_of_align_sample_are_read_as_they_were_sampled(text):
    """`align sample` writes the prompt by `to_json` and the responses as texts."""
    row = {"id": "1", "prompt": to_json(user_turn(text)), "responses": [text], "model": ["m"], "finish_reason": ["length"]}
    assert convert_row(row, Prompt)[1] == [Prompt(prompt=user_turn(text), id="1")]
    (demonstration,) = convert_row(row, Demonstration)[1]
    assert demonstration.prompt == user_turn(text)
    assert demonstration.continuation == (assistant(text),)
    assert demonstration.cut_responses == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS).filter(lambda row: row[1] != row[2]), min_size=1, max_size=4))
def test_exports_of_the_labeling_app_are_read_as_they_were_shown(rows):
    """Prompts and answers are texts in the app's database, whatever they spell."""
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in rows]
    answers = [{"prompt": prompt, "completion": chosen} for prompt, chosen, _ in rows]
    with tempfile.TemporaryDirectory() as folder:
        for name, write in (("rows.jsonl", to_jsonl), ("rows.parquet", to_parquet)):
            path = Path(folder) / name
            path.write_bytes(write(pairs))
            found = read_records(path, Ranking)
            assert [(ranking.prompt, ranking.responses) for ranking in found] == [
                (user_turn(prompt), (chosen, rejected)) for prompt, chosen, rejected in rows
            ]
            path.write_bytes(write(answers))
            assert [(record.prompt, record.continuation) for record in read_records(path, Demonstration)] == [
                (user_turn(prompt), (assistant(chosen),)) for prompt, chosen, _ in rows
            ]


def test_plain_texts_stay_texts():
    row = {"prompt": "Humans: a history", "completion": "[1, 2]", "ranks": [1, 2], "responses": ["a", "b"]}
    assert unambiguous(row) == row
