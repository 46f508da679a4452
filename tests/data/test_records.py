import json
import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data.records import Demonstration, Prompt, Ranking, RuleJudgment
from tests.data.rows import assistant, system, user
from tests.refusals import refusal


def ranking(**changes):
    row = {"prompt": "Hi", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]}
    return Ranking.from_row({**row, **changes})


def judgment(**changes):
    row = {"prompt": "Hi", "response": "a", "rule": "polite", "verdict": "follows"}
    return RuleJudgment.from_row({**row, **changes})


def demonstration(**row):
    return Demonstration.from_row(row)


def test_messages_are_split_before_the_first_assistant_turn():
    turns = [system(""), user("1"), assistant("2"), user("3"), assistant("4")]
    record = Demonstration.from_row({"messages": turns})
    assert (record.prompt, record.continuation) == ((system(""), user("1")), (assistant("2"), user("3"), assistant("4")))
    assert record.to_row() == {"messages": turns}
    row = {"prompt": [user("1"), assistant("2"), user("3")], "completion": [assistant("4")]}
    assert Demonstration.from_row(row).to_row() == {**row, "completion": "4"}


def test_ranks_lose_their_gaps_and_keep_their_ties():
    assert ranking(responses=["a", "b", "c", "d"], ranks=[7, 2, 7, 4]).ranks == (3, 1, 3, 2)
    assert ranking(responses=["a", "a", "b"], ranks=[1, 1, 2]).ranks == (1, 1, 2)  # equal responses may share one
    assert ranking(ranks=[2, 2, 2]).ranks == (1, 1, 1)
    assert ranking(ranks=[2, 2, 2]).all_tied
    assert not ranking(ranks=[1, 2, 2]).all_tied


def test_all_optional_fields_of_a_ranking_are_kept():
    row = {
        "prompt": [system("Be kind."), user("Hi")],
        "responses": ["a", "b"],
        "ranks": [2, 1],
        "margin": 0.5,
        "labeler": "ann",
        "ratings": [1, 7],
        "preferences": [[0.0, 0.2], [0.75, 0.0]],
        "flags": [["rude"], []],
        "model": ["m1", "m2"],
        "id": "r1",
        "category": "chat",
    }
    record = Ranking.from_row(row)
    assert record.flags == (("rude",), ())
    assert record.to_row() == row
    assert Ranking.from_row({**row, "flags": ["unclear"]}).flags == ("unclear",)


def test_absent_and_null_fields_are_the_same_and_are_not_written():
    row = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "ratings": None, "margin": None, "flags": None}
    assert Ranking.from_row(row).to_row() == {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2]}


RANKING_ERRORS = [
    ({"prompt": None}, "field 'prompt': is missing"),
    ({"prompt": {"role": "user"}},
     "field 'prompt': must be a string or a list of turns, not {'role': 'user'}"),
    ({"prompt": " "}, "field 'prompt': is empty; write the text, or remove the row"),
    ({"prompt": 3}, "field 'prompt': must be a string or a list of turns, not 3"),
    ({"prompt": []}, "field 'prompt': has no turns"),
    ({"prompt": [system("x")]}, "field 'prompt': has only a system turn; add the user's turn"),
    ({"prompt": [user("1"), assistant("2")]},
     "field 'prompt': ends with an assistant turn"),
    ({"prompt": [user("1"), system("2")]},
     "field 'prompt[1]': is a system turn after another turn"),
    ({"prompt": [user("1"), user("2")]}, "field 'prompt[1]': is a second consecutive user"),
    ({"prompt": ["Hi"]}, "field 'prompt[0]': is 'Hi', not a turn"),
    ({"prompt": [{"role": "human", "content": "Hi"}]}, "field 'prompt[0].role': is 'human'; use system, user or assistant"),
    ({"prompt": [user(None)]}, "field 'prompt[0].content': is empty; write the text, or remove the row"),
    ({"prompt": "half a pair \ud83d"},
     "field 'prompt':"),
    ({"responses": None}, "field 'responses': is missing"),
    ({"responses": "abc"}, "field 'responses': must be a list, not 'abc'; write it as [..., ...]"),
    ({"responses": ["a"], "ranks": [1]}, "field 'responses': is a list of 1; give from 2 to 9"),
    ({"responses": list("abcdefghij")}, "field 'responses': is a list of 10; give from 2 to 9"),
    ({"responses": ["a", None, "c"]}, "field 'responses[1]': is empty; write the text, or remove the row"),
    ({"ranks": None}, "field 'ranks': is missing"),
    ({"ranks": [1, 2]}, "field 'ranks': has 2 entries for 3 responses"),
    ({"ranks": [0, 1, 2]}, "field 'ranks[0]': is 0; use a whole number of 1 or more"),
    ({"ranks": [1, 1.5, 3]}, "field 'ranks[1]': is 1.5; use a whole number of 1 or more"),
    ({"ranks": [True, 2, 3]}, "field 'ranks[0]': is True; use a whole number of 1 or more"),
    ({"responses": ["a", "a", "c"]},
     "field 'ranks': has ranks 1 and 2 for the same response 'a'"),
    ({"margin": 1.0}, "field 'margin':"),
    ({"ratings": [1, 2]}, "field 'ratings': has 2 entries for 3 responses"),
    ({"ratings": [1, 2, 8]}, "field 'ratings[2]': is 8; use a whole number from 1 to 7"),
    ({"ratings": [0, 2, 7]}, "field 'ratings[0]': is 0; use a whole number from 1 to 7"),
    ({"preferences": [[0, 1], [0, 0]]}, "field 'preferences': has 2 entries for 3 responses"),
    ({"preferences": [[0, 1, 1], [0, 0], [0, 0, 0]]},
     "field 'preferences[1]': has 2 entries for 3 responses"),
    ({"preferences": [[0, 1, 1.5], [0, 0, 1], [0, 0, 0]]}, "field 'preferences[0][2]': is 1.5; use a number from 0 to 1"),
    ({"preferences": [[0.5, 1, 1], [0, 0, 1], [0, 0, 0]]},
     "field 'preferences[0][0]': is 0.5"),
    ({"preferences": [[0, 0.8, 1], [0.3, 0, 1], [0, 0, 0]]},
     "field 'preferences[1][0]': and preferences[0][1] are 0.3 and 0.8, which sum to more than 1; lower one; what is left "
     "of 1 is the probability of a tie"),
    ({"flags": "rude"}, "field 'flags': must be a list, not 'rude'; write it as [..., ...]"),
    ({"flags": [["rude"]]}, "field 'flags': has 1 entries for 3 responses"),
    ({"flags": [["rude"], "x", []]}, "field 'flags[1]': must be a list, not 'x'; write it as [..., ...]"),
    ({"model": ["m1"]}, "field 'model': has 1 entries for 3 responses"),
    ({"labeler": 5}, "field 'labeler':"),
    ({"id": 1.5}, "field 'id': must"),
    ({"category": ""}, "field 'category': is empty; write the text, or remove the row"),
    ({"labeller": "ann"}, "field 'labeller': is not a known field; did you mean 'labeler'? Rename it, or remove it"),
]  # fmt: skip


def test_whole_numbers_may_be_written_as_floats_as_spreadsheets_do():
    found = ranking(responses=["a", "b"], ranks=[2.0, 1.0], ratings=[3.0, 7.0])
    assert json.dumps(found.to_row()["ranks"] + found.to_row()["ratings"]) == "[2, 1, 3, 7]"
    wrong = "; use a whole number of 1 or more"
    for rank in (float("nan"), float("inf"), "1.0"):
        assert refusal(ranking, responses=["a", "b"], ranks=[rank, 1]) == f"field 'ranks[0]': is {rank!r}{wrong}"


@pytest.mark.parametrize("margin", [-1, float("nan"), float("inf"), "1", True])
def test_a_margin_is_finite_and_not_negative(margin):
    message = refusal(ranking, responses=["a", "b"], ranks=[1, 2], margin=margin)
    assert message == f"field 'margin': is {margin!r}; use a finite number that is 0 or more, or leave it out"


DEMONSTRATION_ERRORS = [
    ({"prompt": "Hi"}, "field 'messages': is missing"),
    ({"completion": "x"}, "field 'prompt': is missing"),
    ({"prompt": "Hi", "completion": ""}, "field 'completion': is empty; write the text, or remove the row"),
    ({"prompt": "Hi", "completion": [user("x"), assistant("y")]},
     "field 'completion': begins with a user turn; move the turns before the answer to prompt"),
    ({"prompt": "Hi", "completion": [assistant("x"), user("y")]},
     "field 'completion': ends with a user turn"),
    ({"messages": [user("x")]}, "field 'messages': has no assistant turn"),
    ({"messages": [user("x"), assistant("y"), user("z")]},
     "field 'messages': ends with a user turn"),
    ({"messages": [system("x"), assistant("y")]},
     "field 'messages': has no user turn before the first assistant turn"),
    ({"messages": [user("x"), assistant(" ")]}, "field 'messages[1].content': is empty; write the text, or remove the row"),
]  # fmt: skip


JUDGMENT_ERRORS = [
    ({"verdict": "maybe"}, "field 'verdict': is 'maybe'; use one of violates, unsure, follows"),
    ({"verdict": None}, "field 'verdict': is missing; add it"),
    ({"rule": ""}, "field 'rule': is empty; write the text, or remove the row"),
    ({"response": None}, "field 'response': is missing; add it"),
    ({"notes": "x"}, "field 'notes': is not a known field; did you mean 'note'? Rename it, or remove it"),
]
ERRORS = [(ranking, *error) for error in RANKING_ERRORS]
ERRORS += [(demonstration, *error) for error in DEMONSTRATION_ERRORS]
ERRORS += [(judgment, *error) for error in JUDGMENT_ERRORS]


@pytest.mark.parametrize(("make", "fields", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(make, fields, message):
    assert refusal(make, **fields).startswith(message.partition(";")[0])


def test_a_long_value_does_not_flood_the_message():
    assert len(refusal(ranking, flags="line\n" * 1000)) < 150


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda text: text.strip() != "")
NAMES = st.text(string.ascii_letters, min_size=1, max_size=8)
LABELS = {"id": st.none() | NAMES, "category": st.none() | NAMES}


TURNS = st.lists(TEXTS, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1)
CONTINUATIONS = TURNS.map(lambda texts: tuple(user(text) if i % 2 else assistant(text) for i, text in enumerate(texts)))
SYSTEMS = st.just(()) | (st.just("") | TEXTS).map(lambda text: (system(text),))
ASKED = TURNS.map(lambda texts: tuple(assistant(text) if i % 2 else user(text) for i, text in enumerate(texts)))
PROMPTS = st.builds(lambda first, asked: (*first, *asked), SYSTEMS, ASKED)


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
        prompt=draw(PROMPTS),
        responses=responses,
        ranks=draw(each(st.integers(1, 12))),
        preferences=draw(st.none() | preferences(count)),
        margin=draw(st.none() | st.floats(0, 1e9)) if count == 2 else None,
        labeler=draw(st.none() | NAMES),
        ratings=draw(st.none() | each(st.integers(1, 7))),
        flags=draw(flags),
        model=draw(st.none() | each(NAMES)),
        **{name: draw(values) for name, values in LABELS.items()},
    )


RECORDS = (
    st.builds(Demonstration, prompt=PROMPTS, continuation=CONTINUATIONS, **LABELS)
    | rankings()
    | st.builds(Prompt, prompt=PROMPTS, **LABELS)
    | st.builds(
        RuleJudgment,
        prompt=PROMPTS,
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


def test_a_record_made_in_code_is_checked_too():
    with pytest.raises(UserError, match="field 'ranks'"):
        Ranking(prompt=(user("Hi"),), responses=("a", "b"), ranks=(1,))


PARTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=3)


@given(PARTS, st.sampled_from(["text", "input_text", "output_text"]))
def test_parts_of_text_are_one_text(texts, kind):
    assume("".join(texts).strip())
    turn = user([{"type": kind, "text": text, "image": None} for text in texts])
    assert Prompt(prompt=(turn,)) == Prompt(prompt=(user("".join(texts)),))


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "x"}, {"text": "x"}, "x", None, {"type": "text"}])
def test_a_part_that_is_no_text_is_refused(part):
    said = refusal(Prompt, prompt=(user([{"type": "text", "text": "Hi"}, part]),))
    assert said.startswith("field 'prompt[0].content[1]")


def test_a_developer_turn_is_a_system_turn():
    developer = {"role": "developer", "content": "Be kind."}
    assert Prompt(prompt=(developer, user("Hi"))).prompt == (system("Be kind."), user("Hi"))
    assert "system turn after another" in refusal(Prompt, prompt=(system("a"), developer, user("Hi")))


@pytest.mark.parametrize(
    ("reasons", "complete"),
    [(None, (True, True)), (["stop", "length"], (True, False)), (["MAX_TOKENS", "eos"], (False, True))],
)
def test_the_responses_that_were_cut(reasons, complete):
    record = Ranking(prompt=(user("Hi"),), responses=("a", "b"), ranks=(1, 2), finish_reason=reasons)
    assert record.is_complete == complete
    assert record.cut_responses == complete.count(False)


def test_the_reason_belongs_to_the_last_turn_alone():
    turns = [user("1"), {**assistant("2")}, user("3"), {**assistant("4"), "weight": 0}, user("5"), assistant("6")]
    records = Demonstration.all_from_row({"messages": turns, "finish_reason": "length"})
    assert [record.finish_reason for record in records] == [None, "length"]
