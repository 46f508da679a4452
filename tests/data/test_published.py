import contextlib
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
    with pytest.raises(UserError, match="no known form of a ranking; it looks like a demonstration"):
        convert_row(row, Ranking)
    assert convert_row(row, Demonstration)[1] == [Demonstration(prompt=ONE, continuation=(assistant("a"),))]


ERRORS = [
    (Demonstration, {"conversations": said(("human", "1"), ("tool", "2"))},
     "field 'conversations[1].from': is 'tool'; use system, human or gpt"),
    (Demonstration, {"conversations": said(("gpt", "1"), ("human", "2"), ("gpt", "3"))},
     "field 'messages': has no user turn before the first assistant turn; add what it answers"),
    (Demonstration, {"conversation": ["1"]}, "field 'conversation[0]': is '1'; write {input, output}"),
    (Ranking, TWO, "field 'preferred': is missing; write a, b or tie"),
    (Ranking, {**TWO, "preferred": "left"},
     "field 'preferred': is 'left'; use a, b or tie"),
    (Ranking, {**TWO, "preferred": "0"},
     "field 'preferred': is '0', and a code of 0 and 1 is ambiguous; write a, b or tie"),
    (Ranking, {**TWO, "preferred": 0},
     "field 'preferred': is 0, and a code of 0 and 1 is ambiguous; write a, b or tie"),
    (Ranking, {"prompt": "Hi", "response_a": "a", "preferred": "a"},
     "field 'response_b': is empty; write the text, or remove the row"),
    (Ranking, {**SAFE, "better_response_id": 2}, "field 'better_response_id': is 2; use 0 or 1"),
    (Ranking, {**SUMMARIES, "choice": None}, "field 'choice': is None; use 0 or 1"),
    (Ranking, {**WEBGPT, "question": {}}, "field 'question.full_text': must be text or a list of turns, not None; "
     "write it in quotes"),
    (Ranking, {**WEBGPT, "score_1": None}, "field 'score_1': is None; give a number"),
    (Ranking, arena("model_a", conversation_b=[user("1"), assistant("5"), user("3"), assistant("no")]),
     "field 'conversation_b': differs from 'conversation_a' before its last turn; remove the row, or use skip_bad_rows"),
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
    assert caplog.messages == [f"{path}: left out 1 prompt with a single rated response"]


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
    assert caplog.messages == ["rankings in memory: left out 1 prompt with a single rated response"]
    with pytest.raises(UserError, match="rankings in memory: has no ranking; give at least one"):
        encode_rankings(rows[2:], load_sharp("tiny-gpt2"), Limits(100, 100), False)


def test_labels_of_kto_make_pairs_or_are_refused(tmp_path):
    path = tmp_path / "kto.jsonl"
    rows = [{"prompt": "Hi", "completion": text, "label": text != "c"} for text in "abc"]
    path.write_bytes(lines(rows))
    assert read_records(path, Ranking) == [ranked(HI, *"abc", ranks=(1, 1, 2))]
    path.write_bytes(lines([rows[0], {**rows[2], "prompt": "Bye"}]))
    wrong = "no usable ranking; each of its 2 prompts has a single rated response"
    remedy = "a comparison needs two or more responses to the same prompt"
    assert error_of(path, Ranking) == f"{path}: {wrong}; {remedy}"


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
