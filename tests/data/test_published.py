import contextlib
import json
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from align.batches.encoding import Limits, encode_rankings
from align.core.errors import UserError
from align.data.formats import KINDS, convert_row
from align.data.layouts import RatedAnswer, rank_ratings
from align.data.readers import read_records
from align.data.records import Demonstration, Ranking
from tests.data.rows import HI, assistant, error_of, lines, system, user

ONE = (user("1"),)
THREE = (user("1"), assistant("2"), user("3"))


def said(*turns):
    return [{"from": speaker, "value": value} for speaker, value in turns]


def ranked(prompt, *responses, ranks=(1, 2), **more):
    return Ranking(prompt=prompt, responses=responses, ranks=ranks, **more)


def rated(rating, response="a", prompt=HI, **more):
    return RatedAnswer(prompt=prompt, response=response, rating=rating, **more)


def arena(winner, answers=("yes", "no"), **more):
    sides = {f"conversation_{side}": [*THREE, assistant(text)] for side, text in zip("ab", answers, strict=True)}
    other = {"turn": 2, "anony": True, "language": "English", "tstamp": 1682351591.1, "judge": "arena_user_1"}
    return {"question_id": "58", "model_a": "m1", "model_b": "m2", "winner": winner, **sides, **other, **more}


SHAREGPT = {"id": "x_0", "conversations": said(("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4"))}
SHAREGPT_PROMPT = {"conversations": said(("system", "s"), ("human", "1"))}
CAPYBARA = {"source": "Airoboros", "conversation": [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]}
OPENORCA = {"id": "cot.1", "system_prompt": "s", "question": "1", "response": "2"}
NECTAR = {
    "prompt": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant: ",
    "answers": [
        {"answer": text, "model": f"m{text}", "rank": float(rank)}
        for text, rank in zip("abcdefg", (7, 2, 1, 3, 4, 6, 5), strict=True)
    ],
    "turns": 2,
    "num_responses": 7,
    "source": ["sharegpt"],
    "good_natured": True,
}
WEBGPT = {
    "question": {"dataset": "eli5", "id": "5e", "full_text": "Hi"},
    "quotes_0": {"title": ["t"], "extract": ["e"]},
    "answer_0": "a",
    "tokens_0": {"prefix": [5], "completion": [6]},
    "score_0": -0.5,
    "quotes_1": {"title": ["t"], "extract": ["e"]},
    "answer_1": "b",
    "tokens_1": {"prefix": [5], "completion": [7]},
    "score_1": 0.5,
}
POST = {"id": "t3_1", "post": "My cat.", "title": "Cats", "subreddit": "aww", "site": None, "article": None}
TLDR = "SUBREDDIT: r/aww\n\nTITLE: Cats\n\nPOST: My cat.\n\nTL;DR:"
SUMMARIES = {
    "info": POST,
    "summaries": [{"text": " a", "policy": "sup2", "note": ""}, {"text": " b", "policy": "ref", "note": None}],
    "choice": 1,
    "worker": "w9",
    "batch": "batch3",
    "split": "train",
    "extra": {"confidence": 6},
}
ARTICLE = {**POST, "post": None, "title": None, "subreddit": None, "site": "cnndm", "article": "News."}
SAFE = {
    "prompt": "Hi",
    "response_0": "a",
    "response_1": "b",
    "prompt_source": "Alpaca3-70B",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "response_0_harm_category": {"Violence": False},
    "response_1_harm_category": {"Violence": True},
    "response_0_severity_level": 0,
    "response_1_severity_level": 2,
    "better_response_id": 1,
    "safer_response_id": 0,
}
RATED = {
    "prompt": "Hi",
    "response": "a",
    "helpfulness": 3,
    "correctness": 4,
    "coherence": 4,
    "complexity": 2,
    "verbosity": 1,
}
MARKED = "1\n<extra_id_1>Assistant\n2\n<extra_id_1>User\n3"
HELPSTEER_2 = {"split": "train", "prompt": MARKED, "response_1": "a", "response_2": "b", "preference_strength": -2}
HELPSTEER_3 = {
    "domain": "code",
    "language": "python",
    "context": list(THREE),
    "response1": "a",
    "response2": "b",
    "overall_preference": 1,
    "individual_preference": [{"score": 1, "reasoning": "r", "feedback1": "f", "feedback2": "g"}],
}
ALPACA_KTO = {"instruction": "1", "input": "", "output": "a", "kto_tag": False}
TWO = {"prompt": "Hi", "response_a": "a", "response_b": "b"}


def parts(*texts):
    return [{"type": "text", "text": text, "image": None, "mimeType": None} for text in texts]


ARENA_55K = {
    "id": 7,
    "model_a": "m1",
    "model_b": "m2",
    "prompt": json.dumps(["1", "3"]),
    "response_a": json.dumps(["2", "x"]),
    "response_b": json.dumps(["2", "y"]),
    "winner_model_a": 1,
    "winner_model_b": 0,
    "winner_tie": 0,
}
ALPACA_EVAL = {
    "instruction": "Hi",
    "output_1": "a",
    "generator_1": "m1",
    "dataset": "helpful_base",
    "output_2": "b",
    "generator_2": "m2",
    "annotator": "gpt4",
    "preference": 1.9,
}
QA_FEEDBACK = {
    "question": "Hi",
    "passages": [["Mill", "Mill\n\nIt is", "old."]],
    **{f"prediction {number}": text for number, text in enumerate("abcd", 1)},
    "preference": [1, 1, 1, 1, 1, 0],
}
RANKED = [{"value": "response_2", "rank": 1}, {"value": "response_1", "rank": 2}]
ARGILLA = {
    "id": "r1",
    "status": "completed",
    "fields": {"prompt": "Hi", "response_1": "a", "response_2": "b"},
    "responses": {
        "ranking": [
            {"value": RANKED, "user_id": "u1"},
            {"value": [{**entry, "rank": 1} for entry in RANKED], "user_id": "u2"},
            {"value": RANKED, "user_id": "u3", "status": "discarded"},
        ],
        "comment": [{"value": "fine", "user_id": "u1"}],
    },
    "suggestions": {},
    "metadata": {},
}
LABEL_STUDIO = {
    "id": 5,
    "data": {"prompt": "Hi", "answer1": "a", "answer2": "b"},
    "annotations": [
        {"completed_by": 7, "result": [{"from_name": "pw", "type": "pairwise", "value": {"selected": "right"}}]},
        {"completed_by": 8, "was_cancelled": True, "result": [{"from_name": "pw", "value": {"selected": "left"}}]},
    ],
}

ROWS = [
    ("ShareGPT", SHAREGPT, [Demonstration(prompt=ONE, continuation=(assistant("2"), user("3"), assistant("4")), id="x_0")]),
    ("ShareGPT", {"conversations": said(("human", "1"), ("gpt", "2")), "system": "s"},
     [Demonstration(prompt=(system("s"), *ONE), continuation=(assistant("2"),))]),
    ("ShareGPT", {"conversations": [*SHAREGPT["conversations"][:1], {"from": "gpt", "value": "2", "weight": 0},
                                    *SHAREGPT["conversations"][2:]]},
     [Demonstration(prompt=THREE, continuation=(assistant("4"),))]),
    ("Capybara", CAPYBARA, [Demonstration(prompt=ONE, continuation=(assistant("2"), user("3"), assistant("4")))]),
    ("OpenOrca", OPENORCA, [Demonstration(prompt=(system("s"), *ONE), continuation=(assistant("2"),), id="cot.1")]),
    ("preferred", {"prompt": "Hi", "response_a": "a", "response_b": "b", "preferred": "B"},
     [ranked(HI, "a", "b", ranks=(2, 1))]),
    ("preferred", {"prompt": "Hi", "response_a": "a", "response_b": "b", "preferred": "tie", "labeler": "ann", "id": 4},
     [ranked(HI, "a", "b", ranks=(1, 1), labeler="ann", id="4")]),
    ("KTO", {"prompt": "Hi", "completion": "a", "label": True}, [rated(1)]),
    ("KTO", {"prompt": "Hi", "completion": "a", "label": 0}, [rated(0)]),
    ("KTO", {"prompt": [user("Hi")], "completion": [assistant("a")], "label": False}, [rated(0)]),
    ("LLaMA-Factory KTO", ALPACA_KTO, [rated(0, prompt=ONE)]),
    ("LLaMA-Factory KTO", {"conversations": said(("human", "Hi"), ("gpt", "a")), "kto_tag": True}, [rated(1)]),
    ("LLaMA-Factory KTO", {"messages": [user("Hi"), assistant("a")], "kto_tag": True}, [rated(1)]),
    ("LLaMA-Factory KTO", {"messages": [user("Hi"), assistant("a")], "label": False}, [rated(0)]),
    ("LLaMA-Factory pair",
     {"instruction": "1", "input": "x", "chosen": "a", "rejected": "b", "system": "s", "history": [["0", "y"]]},
     [ranked((system("s"), user("0"), assistant("y"), user("1\n\nx")), "a", "b")]),
    ("ShareGPT pair",
     {"conversations": said(("human", "Hi")), "chosen": said(("gpt", "a"))[0], "rejected": said(("gpt", "b"))[0]},
     [ranked(HI, "a", "b")]),
    ("messages pair", {"messages": [user("Hi")], "chosen": assistant("a"), "rejected": assistant("b")},
     [ranked(HI, "a", "b")]),
    ("Orca pair", {"system": "s", "question": "Hi", "chosen": "a", "rejected": "b"}, [ranked((system("s"), *HI), "a", "b")]),
    ("Orca pair",
     {"system": "", "input": "Hi", "chosen": "a", "rejected": "b", "status": "unchanged", "generations": ["a", "b"]},
     [ranked(HI, "a", "b")]),
    ("Nectar", NECTAR,
     [ranked(THREE, *"abcdefg", ranks=(7, 2, 1, 3, 4, 6, 5), model=tuple(f"m{text}" for text in "abcdefg"))]),
    ("WebGPT", WEBGPT, [ranked(HI, "a", "b", ranks=(2, 1))]),
    ("WebGPT", {**WEBGPT, "score_0": 0.0, "score_1": 0.0}, [ranked(HI, "a", "b", ranks=(1, 1))]),
    ("summarize_from_feedback", SUMMARIES, [ranked((user(TLDR),), " a", " b", ranks=(2, 1), id="t3_1", labeler="w9")]),
    ("summarize_from_feedback", {**SUMMARIES, "info": ARTICLE, "choice": 0, "worker": None},
     [ranked((user("Article:\nNews.\n\nTL;DR:"),), " a", " b", id="t3_1")]),
    ("SafeRLHF", SAFE, [ranked(HI, "a", "b", ranks=(2, 1))]),
    ("HelpSteer", RATED, [rated(3)]),
    ("HelpSteer", {**RATED, "prompt": MARKED}, [rated(3, prompt=THREE)]),
    ("HelpSteer 2", HELPSTEER_2, [ranked(THREE, "a", "b")]),
    ("HelpSteer 3", HELPSTEER_3, [ranked(THREE, "a", "b", ranks=(2, 1), category="code")]),
    ("HelpSteer 3", {**HELPSTEER_3, "overall_preference": 0}, [ranked(THREE, "a", "b", ranks=(1, 1), category="code")]),
    ("Chatbot Arena", arena("model_b"), [ranked(THREE, "yes", "no", ranks=(2, 1), id="58", model=("m1", "m2"))]),
    ("Chatbot Arena", arena("both_bad"), [ranked(THREE, "yes", "no", ranks=(1, 1), id="58", model=("m1", "m2"))]),
    # MT-bench's judgments of the first turn show both turns
    ("Chatbot Arena",
     {"question_id": 81, "winner": "model_a", "turn": 1, "conversation_a": [*THREE, assistant("4")],
      "conversation_b": [user("1"), assistant("x"), user("3"), assistant("y")]}, [ranked(ONE, "2", "x", id="81")]),
    # Arena 140k: parts of text, in Arena-Expert as JSON
    ("Chatbot Arena",
     {"id": "u", "winner": "model_b", "conversation_a": [user(parts("Hi")), assistant(parts("a"))],
      "conversation_b": json.dumps([user(parts("Hi")), assistant(parts("b", "c"))])},
     [ranked(HI, "a", "bc", ranks=(2, 1), id="u")]),
    ("Arena 55k", ARENA_55K, [ranked(THREE, "x", "y", id="7", model=("m1", "m2"))]),
    ("Arena 55k", {**ARENA_55K, "winner_model_a": "0", "winner_tie": "1"},
     [ranked(THREE, "x", "y", ranks=(1, 1), id="7", model=("m1", "m2"))]),
    ("AlpacaEval", ALPACA_EVAL, [ranked(HI, "a", "b", ranks=(2, 1), labeler="gpt4", model=("m1", "m2"))]),
    ("AlpacaEval", {**ALPACA_EVAL, "preference": 1, "input": "x", "generator_1": None, "annotator": 3},
     [ranked((user("Hi\n\nx"),), "a", "b")]),
    ("AlpacaEval", {**ALPACA_EVAL, "preference": 1.5},
     [ranked(HI, "a", "b", ranks=(1, 1), labeler="gpt4", model=("m1", "m2"))]),
    ("qa-feedback", QA_FEEDBACK,
     [ranked((user("Hi\n\nMill\n\nIt is old."),), *"abcd", ranks=(1, 2, 3, 3), preferences=(
         (0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)))]),
    # a cycle: b over a, c over b, a over c; d loses all
    ("qa-feedback", {**QA_FEEDBACK, "passages": [], "preference": [2, 1, 1, 2, 1, 1]},
     [ranked(HI, *"abcd", ranks=(1, 1, 1, 2), preferences=(
         (0.0, 0.0, 1.0, 1.0), (1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)))]),
    ("UltraChat", {"id": "0", "data": ["1", "2", "3", "4"]},
     [Demonstration(prompt=ONE, continuation=(assistant("2"), user("3"), assistant("4")), id="0")]),
    ("ShareGPT", {"conversations": ["1", "2"], "source": "stackexchange"},
     [Demonstration(prompt=ONE, continuation=(assistant("2"),))]),
    ("GSM8K", {"question": "1", "answer": "2 #### 2"}, [Demonstration(prompt=ONE, continuation=(assistant("2 #### 2"),))]),
    ("Alpaca", {"instruction": "1", "context": "x", "output": "2"},
     [Demonstration(prompt=(user("1\n\nx"),), continuation=(assistant("2"),))]),
    ("Dolly", {"instruction": "1", "input": "x", "response": "2", "category": "c"},
     [Demonstration(prompt=(user("1\n\nx"),), continuation=(assistant("2"),), category="c")]),
    # Argilla: a record as JSON, the columns of version 2 and of version 1
    ("Argilla", ARGILLA,
     [ranked(HI, "b", "a", id="r1", labeler="u1"), ranked(HI, "b", "a", ranks=(1, 1), id="r1", labeler="u2")]),
    ("Argilla",
     {"id": "r1", "prompt": "Hi", "response_1": "a", "response_2": "b", "best.responses": ["response_2", "response_1"],
      "best.responses.users": ["u1", "u2"], "best.responses.status": ["submitted", "discarded"]},
     [ranked(HI, "a", "b", ranks=(2, 1), id="r1", labeler="u1")]),
    ("Argilla",
     {"prompt": "Hi", "response-1": "a", "response-2": "b",
      "rank": [{"user_id": "u1", "value": {"rank": [2, 1], "value": ["response-1", "response-2"]}, "status": "submitted"}]},
     [ranked(HI, "a", "b", ranks=(2, 1), labeler="u1")]),
    ("Argilla",
     {"fields": {"instruction": "Hi", "completion": "a"}, "responses": {"quality": [{"value": 4, "user_id": "u1"}]}},
     [rated(4)]),
    ("Label Studio", LABEL_STUDIO, [ranked(HI, "a", "b", ranks=(2, 1), id="5", labeler="7")]),
    ("Label Studio",
     {"id": 5, "data": {"question": "Hi", "items": [{"id": 1, "title": "a"}, {"id": 2, "title": "t", "body": "b"}]},
      "annotations": [{"completed_by": {"id": 7, "email": "ann@x.org"},
                       "result": [{"from_name": "r", "value": {"ranker": {"rank": ["2", "1"]}}}]}]},
     [ranked(HI, "b", "a", id="5", labeler="ann@x.org")]),
    ("Label Studio",
     {"data": {"prompt": "Hi", "response": "a"},
      "annotations": [{"result": [{"from_name": "stars", "value": {"rating": 4}}]}]},
     [rated(4)]),
    ("Chatbot Arena", arena("tie (bothbad)"), [ranked(THREE, "yes", "no", ranks=(1, 1), id="58", model=("m1", "m2"))]),
]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "1", "input": "", "output": "a", "label": 1},
        {"instruction": "1", "input": "", "output": "a", "label": True},
        {"conversations": said(("human", "1"), ("gpt", "a")), "label": 1},
        {"messages": [user("1"), assistant("a")], "label": 1},
    ],
)
def test_a_label_that_may_be_a_class_makes_no_rating(row):
    with pytest.raises(UserError, match="do not match a known layout of a ranking; it looks like a demonstration"):
        convert_row(row, Ranking)
    assert convert_row(row, Demonstration)[1] == [Demonstration(prompt=ONE, continuation=(assistant("a"),))]


ERRORS = [
    (Demonstration, {"conversations": said(("human", "1"), ("tool", "2"))},
     "field 'conversations[1].from': is 'tool'; use system, human or gpt"),
    (Demonstration, {"conversations": said(("gpt", "1"), ("human", "2"), ("gpt", "3"))},
     "field 'messages': has no user turn before the first assistant turn"),
    (Demonstration, {"conversation": ["1"]}, "field 'conversation[0]': is '1'; write {input, output}"),
    (Ranking, TWO, "field 'preferred': is missing"),
    (Ranking, {**TWO, "preferred": "left"},
     "field 'preferred': is 'left'; use a, b or tie"),
    (Ranking, {**TWO, "preferred": "0"},
     "field 'preferred':"),
    (Ranking, {**TWO, "preferred": 0},
     "field 'preferred':"),
    (Ranking, {"prompt": "Hi", "response_a": "a", "preferred": "a"},
     "field 'response_b': is empty; write the text, or remove the row"),
    (Ranking, {**SAFE, "better_response_id": 2}, "field 'better_response_id': is 2; use 0 or 1"),
    (Ranking, {**SUMMARIES, "choice": None}, "field 'choice': is None; use 0 or 1"),
    (Ranking, {**WEBGPT, "question": {}}, "field 'question.full_text': must be a string or a list of turns, not None; "
     "write it in quotes"),
    (Ranking, {**WEBGPT, "score_1": None}, "field 'score_1': is None; give a number"),
    (Ranking, arena("model_a", conversation_b=[user("1"), assistant("5"), user("3"), assistant("no")]),
     "field 'conversation_b': differs from 'conversation_a' before its last turn"),
    (Ranking, {**NECTAR, "answers": [{"answer": "a", "rank": None}]}, "field 'answers[0].rank': is None; give a number"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "ranks"), [("A first 1", (1, 2)), ("b Second 2", (2, 1)), ("Tie both Neither same", (1, 1))]
)
def test_words_for_the_better_answer(words, ranks):
    for word in words.split():
        assert convert_row({**TWO, "preferred": word}, Ranking)[1] == [ranked(HI, "a", "b", ranks=ranks)]


def test_a_column_selects_the_label_of_safety(tmp_path):
    path = tmp_path / "safe.jsonl"
    path.write_bytes(lines([SAFE]))
    assert read_records(f"{path}[better_response_id=safer_response_id]", Ranking) == [ranked(HI, "a", "b")]


def test_ratings_are_ranked_by_prompt(tmp_path, caplog):
    path = tmp_path / "stars.jsonl"
    rows = [("Hi", "a", 2), ("Bye", "x", 5), ("Hi", "b", 4.5), ("Hi", "a", 5), ("Once", "o", 1), ("Bye", "y", 5)]
    path.write_bytes(lines([{"prompt": p, "response": r, "rating": n, "category": "c"} for p, r, n in rows]))
    expected = [
        ranked(HI, "a", "b", ranks=(2, 1), category="c"),  # (2 + 5) / 2 is less than 4.5
        ranked((user("Bye"),), "x", "y", ranks=(1, 1), category="c"),
    ]
    assert read_records(path, Ranking) == expected
    assert caplog.messages == [f"{path}: skipped 1 prompt with a single rated response"]


TENTHS = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(TENTHS, TENTHS)
@example([41, 43], [42])
@example([1, 2, 3], [3, 2, 1])
def test_mean_ratings_that_are_equal_are_a_tie(of_a, of_b):
    answers = [rated(tenths / 10, response) for response, all_tenths in (("a", of_a), ("b", of_b)) for tenths in all_tenths]
    means = Fraction(sum(of_a), len(of_a)), Fraction(sum(of_b), len(of_b))
    ranks = (1, 1) if means[0] == means[1] else (1, 2) if means[0] > means[1] else (2, 1)
    assert rank_ratings(answers)[0] == [ranked(HI, "a", "b", ranks=ranks)]


@pytest.mark.parametrize("number", [float("inf"), -float("inf")])
def test_ratings_are_finite(number):
    with pytest.raises(UserError, match=f"field 'rating': is {number}; use a finite number"):
        rated(number)


def test_ratings_in_memory_are_ranked_too(load_sharp, caplog):
    rows = [
        {"prompt": prompt, "response": text, "rating": len(text)} for prompt, text in (("a", "b"), ("a", "cc"), ("d", "e"))
    ]
    (found,) = encode_rankings(rows, load_sharp("tiny-gpt2"), Limits(100, 100), False)
    assert found.ranks == [2, 1]
    assert caplog.messages == ["rankings in memory: skipped 1 prompt with a single rated response"]
    with pytest.raises(UserError, match="rankings in memory: no rankings"):
        encode_rankings(rows[2:], load_sharp("tiny-gpt2"), Limits(100, 100), False)


def test_labels_of_kto_make_pairs_or_are_refused(tmp_path):
    path = tmp_path / "kto.jsonl"
    rows = [{"prompt": "Hi", "completion": text, "label": text != "c"} for text in "abc"]
    path.write_bytes(lines(rows))
    assert read_records(path, Ranking) == [ranked(HI, *"abc", ranks=(1, 1, 2))]
    path.write_bytes(lines([rows[0], {**rows[2], "prompt": "Bye"}]))
    wrong = "no usable ranking"
    remedy = "rate two or more responses per prompt"
    message = error_of(path, Ranking)
    assert message.startswith(f"{path}: {wrong}")
    assert message.endswith(remedy)


MANY = [f"t{number}" for number in range(17)]
NINE = tuple(MANY[::2])
OF_MANY = {
    "scores": [{"question": "Hi", "answers": [{"text": text, "pm_score": n} for n, text in enumerate(MANY)]}],
    "ratings": [{"prompt": "Hi", "response": text, "rating": n} for n, text in enumerate(MANY)],
}


@pytest.mark.parametrize("form", OF_MANY)
def test_of_many_responses_nine_spread_over_the_order_are_kept(form, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(OF_MANY[form]))
    assert read_records(path, Ranking) == [ranked(HI, *NINE, ranks=tuple(range(9, 0, -1)))]


JUNK = [
    None, 5, -1, 2.5, float("nan"), "x", "", [], {}, [1], [{}], ["x"], [["x"]], [None], True, False, {"a": 1},
    [user("x")], said(("human", 5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "records"), ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_whatever_a_field_holds_is_read_or_refused(name, row, records):
    for field, value, kind in product(row, JUNK, KINDS.values()):
        with contextlib.suppress(UserError):
            convert_row({**row, field: value}, kind)
