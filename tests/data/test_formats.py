import pytest

from align.data.formats import FORMATS, KINDS, convert_row
from align.data.layouts import RatedAnswer
from align.data.records import AttributeJudgment, Demonstration, Prompt, Ranking, RuleJudgment, evenly_spaced
from tests.data.rows import (
    ALPACA,
    BINARIZED,
    DIALOGUE,
    DOLLY,
    HH,
    HI,
    SHP,
    STACK,
    STACK_PAIR,
    ULTRAFEEDBACK,
    UNRATED,
    assistant,
    system,
    user,
)
from tests.data.test_published import ARENA_55K, ARGILLA, HELPSTEER_3, LABEL_STUDIO, QA_FEEDBACK, SHAREGPT_PROMPT, WEBGPT
from tests.data.test_published import ERRORS as PUBLISHED_ERRORS
from tests.data.test_published import ROWS as PUBLISHED
from tests.refusals import refusal


def pair(prompt, best, worst, **fields):
    return Ranking(prompt=prompt, responses=(best, worst), ranks=(1, 2), **fields)


OF_THREE = {"prompt": HI, "responses": ("a", "b", "c"), "model": ("m1", "m2", "m3"), "category": "evol_instruct"}
ROWS = [
    # This project's own rows and TRL's
    ("prompt-completion", {"prompt": "Hi", "completion": "Yo"}, [Demonstration(prompt=HI, continuation=(assistant("Yo"),))]),
    ("prompt-completion", {"prompt": [user("Hi")], "completion": [assistant("Yo")]},
     [Demonstration(prompt=HI, continuation=(assistant("Yo"),))]),
    ("messages", {"messages": [*DIALOGUE, assistant("4")]},
     [Demonstration(prompt=(user("1"),), continuation=(assistant("2"), user("3"), assistant("4")))]),
    ("sampled",
     {"prompt": "Hi", "responses": ["a", "b"], "model": ["m", "m"], "finish_reason": ["stop", "length"]},
     [Demonstration(prompt=HI, continuation=(assistant(text),), finish_reason=reason)
      for text, reason in (("a", "stop"), ("b", "length"))]),
    ("prompt-completion", {"prompt": "Hi", "completion": "Yo", "finish_reason": "max_tokens"},
     [Demonstration(prompt=HI, continuation=(assistant("Yo"),), finish_reason="max_tokens")]),
    ("pair", {"prompt": "Hi", "chosen": "yes", "rejected": "no", "finish_reason": ["stop", "length"]},
     [pair(HI, "yes", "no", finish_reason=("stop", "length"))]),
    ("sampled",
     {"id": "7", "prompt": "Hi", "responses": ["a", "b"], "model": ["m", "m"], "category": "c", "rewards": [1.0, 0.5]},
     [Demonstration(prompt=HI, continuation=(assistant(text),), id="7", category="c") for text in "ab"]),
    ("ranking", {"prompt": "Hi", "responses": ["a", "b"], "ranks": [2, 1], "labeler": "ann", "created": "today"},
     [Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1), labeler="ann")]),
    ("pair", {"prompt": "Hi", "chosen": "yes", "rejected": "no", "margin": 2, "labeler": "ann", "id": 4},
     [pair(HI, "yes", "no", margin=2.0, labeler="ann", id="4")]),
    ("pair", {"prompt": list(DIALOGUE), "chosen": [assistant("yes")], "rejected": [assistant("no")]},
     [pair(DIALOGUE, "yes", "no")]),
    ("pair", {"chosen": [system("s"), user("1"), assistant("yes")], "rejected": [system("s"), user("1"), assistant("no")]},
     [pair((system("s"), user("1")), "yes", "no")]),
    ("rule judgment", {"prompt": "Hi", "response": "a", "rule": "polite", "verdict": "unsure"},
     [RuleJudgment(prompt=HI, response="a", rule="polite", verdict="unsure")]),
    ("attribute judgment",
     {"prompt": "Hi", "response": "a", "attributes": {"sensible": 1, "rating": None, "depth": 2.5}, "labeler": "ann"},
     [AttributeJudgment(prompt=HI, response="a", attributes={"sensible": 1, "depth": 2.5}, labeler="ann")]),
    ("prompt", {"prompt": "Hi", "id": "p1"}, [Prompt(prompt=HI, id="p1")]),
    ("question", {"question_id": 81, "category": "writing", "turns": ["Hi", "Shorter."]},
     [Prompt(prompt=HI, id="81", category="writing")]),
    ("question", {"uid": "8f", "cluster": "c", "turns": [{"content": "Hi"}]}, [Prompt(prompt=HI, id="8f")]),
    ("token ids", {"input_ids": [5, 6], "id": "p1"}, [Prompt(ids=(5, 6), id="p1")]),
    # Other people's
    ("HH-RLHF", HH, [pair(DIALOGUE, "yes", "no")]),
    ("pair", {"prompt": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant:", "chosen": " yes", "rejected": " no"},
     [pair(DIALOGUE, " yes", " no")]),
    ("pair", BINARIZED, [pair(HI, "yes", "no")]),
    ("pair", {**BINARIZED, "score_rejected": 8.0}, [Ranking(prompt=HI, responses=("yes", "no"), ranks=(1, 1))]),
    ("messages", BINARIZED, [Demonstration(prompt=HI, continuation=(assistant("yes"),))]),
    ("Alpaca", ALPACA, [Demonstration(prompt=(user("Sort.\n\nb a"),), continuation=(assistant("a b"),))]),
    ("Alpaca", {**ALPACA, "input": ""}, [Demonstration(prompt=(user("Sort."),), continuation=(assistant("a b"),))]),
    ("Dolly", DOLLY, [Demonstration(prompt=(user("When?"),), continuation=(assistant("Now."),), category="open_qa")]),
    # by the means
    ("UltraFeedback", ULTRAFEEDBACK, [Ranking(**OF_THREE, ranks=(3, 1, 2))]),
    # by the scores up to 10: 7 of 10 is not more than a mean of 4.75 of 5
    ("UltraFeedback", UNRATED, [Ranking(**OF_THREE, ranks=(1, 3, 2))]),
    ("UltraFeedback pair",
     {"source": "flan_v2_niv2", "instruction": "Hi", "chosen_response": "yes", "rejected_response": "no",
      "chosen_avg_rating": 4.5, "rejected_avg_rating": 2.0, "chosen_model": "m1"},
     [pair(HI, "yes", "no")]),
    ("SHP", SHP, [Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1), id="qt3nxl", category="askculinary")]),
    ("SHP", {**SHP, "labels": 1, "domain": None}, [pair(HI, "a", "b", id="qt3nxl")]),
    ("scored answers", STACK, [Ranking(prompt=HI, responses=("a", "b", "c"), ranks=(2, 1, 2), id="31")]),
    ("scored answers", {"question": "Hi", "answers": {"text": ["a", "b"], "score": [3, 4]}},
     [Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1))]),
    ("StackExchange pair", {**STACK_PAIR, "response_j": "yes", "response_k": "no"}, [pair(HI, "yes", "no", id="31")]),
]  # fmt: skip


EVERY = [*ROWS, *PUBLISHED]


@pytest.mark.parametrize(("name", "row", "records"), EVERY, ids=[f"{i}-{row[0]}" for i, row in enumerate(EVERY)])
def test_row_to_records(name, row, records):
    kind = type(records[0])
    layout, found = convert_row(row, Ranking if kind is RatedAnswer else kind)
    assert (layout.name, found) == (name, records)
    if (name, row, records) in PUBLISHED:
        (asked,) = convert_row(row, Prompt)[1]
        is_multi_turn = kind is Demonstration and len(records[0].continuation) > 1
        assert asked.prompt == ((*records[0].prompt, *records[0].continuation[:-1]) if is_multi_turn else records[0].prompt)


PROMPTS = [
    ({"prompt": "Hi", "completion": "", "category": "chat"}, Prompt(prompt=HI, category="chat")),
    ({"prompt": "Hi", "responses": ["a"], "ranks": "later"}, Prompt(prompt=HI)),
    ({"prompt": list(DIALOGUE), "chosen": [assistant("")], "rejected": None}, Prompt(prompt=DIALOGUE)),
    ({"messages": [system("s"), user("Hi"), assistant("Yo")]}, Prompt(prompt=(system("s"), user("Hi")))),
    ({"messages": [user("Hi")], "id": 3}, Prompt(prompt=HI, id="3")),
    # up to the last turn of the user
    ({"messages": [*DIALOGUE]}, Prompt(prompt=DIALOGUE)),
    ({"messages": [*DIALOGUE, assistant("4")]}, Prompt(prompt=DIALOGUE)),
    ({"messages": [system("s"), *DIALOGUE, assistant("4"), user("5")]},
     Prompt(prompt=(system("s"), *DIALOGUE, assistant("4"), user("5")))),
    ({"chosen": [user("Hi"), assistant("yes")]}, Prompt(prompt=HI)),
    (HH, Prompt(prompt=DIALOGUE)),
    ({"chosen": "\n\nHuman: Hi\n\nAssistant:", "rejected": "?"}, Prompt(prompt=HI)),
    ({"prompt": "\n\nHuman: Hi\n\nAssistant:", "response": " Yo"}, Prompt(prompt=HI)),
    (ALPACA, Prompt(prompt=(user("Sort.\n\nb a"),))),
    (DOLLY, Prompt(prompt=(user("When?"),), category="open_qa")),
    (ULTRAFEEDBACK, Prompt(prompt=HI, category="evol_instruct")),
    (SHP, Prompt(prompt=HI, category="askculinary")),
    (STACK, Prompt(prompt=HI, id="31")),
    (SHAREGPT_PROMPT, Prompt(prompt=(system("s"), user("1")))),
    ({**WEBGPT, "score_0": "?", "answer_1": 5}, Prompt(prompt=HI)),
    ({**ARENA_55K, "winner_model_a": "?"}, Prompt(prompt=DIALOGUE, id="7")),
    ({**ARGILLA, "responses": {}}, Prompt(prompt=HI, id="r1")),
    ({**LABEL_STUDIO, "annotations": []}, Prompt(prompt=HI, id="5")),
    ({**QA_FEEDBACK, "preference": "?"}, Prompt(prompt=(user("Hi\n\nMill\n\nIt is old."),))),
    ({**HELPSTEER_3, "overall_preference": "?"}, Prompt(prompt=DIALOGUE, category="code")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt"), PROMPTS, ids=range(len(PROMPTS)))
def test_row_to_prompt_without_a_look_at_the_answers(row, prompt):
    assert convert_row(row, Prompt)[1] == [prompt]


def test_one_speaker_twice_in_a_row_is_one_turn():
    row = {
        "chosen": "\n\nHuman: 1\n\nAssistant: 2\n\nAssistant: 3\n\nHuman: 4\n\nAssistant: yes",
        "rejected": "\n\nHuman: 1\n\nAssistant: 2\n\nAssistant: 3\n\nHuman: 4\n\nAssistant: no\n\nAssistant: no",
    }
    expected = pair((user("1"), assistant("2\n\n3"), user("4")), "yes", "no\n\nno")
    assert convert_row(row, Ranking)[1] == [expected]


def test_spread_keeps_the_ends_and_never_repeats():
    assert evenly_spaced(9) == list(range(9))
    assert evenly_spaced(10) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    for count in range(10, 60):
        kept = evenly_spaced(count)
        assert kept == sorted(set(kept))
        assert (len(kept), kept[0], kept[-1]) == (9, 0, count - 1)


def test_every_layout_belongs_to_a_known_kind_and_is_tested_here():
    assert {layout.kind for layout in FORMATS} == set(KINDS.values())
    tested = {name for name, _, _ in EVERY} | {"OpenAssistant tree", "rated answer"}
    assert {layout.name for layout in FORMATS} == tested


ERRORS = [
    (Ranking, {**HH, "rejected": "\n\nHuman: other\n\nAssistant: no"},
     "field 'rejected': differs from 'chosen' before its last turn; use the same prompt for both or remove the row"),
    (Ranking, {"prompt": [system("s"), *DIALOGUE], "chosen": [*DIALOGUE, assistant("yes")], "rejected": [assistant("no")]},
     "field 'prompt': differs from the turns of 'chosen' before the last one; remove one of them"),
    (Ranking, {**HH, "rejected": None}, "field 'rejected': is missing; write the transcript"),
    (Ranking, {**HH, "rejected": HH["chosen"]}, "field 'rejected': is identical to 'chosen'"),
    (Ranking, {**HH, "chosen": "\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant: "},
     "field 'chosen': is empty; write the text, or remove the row"),
    (Ranking, {**HH, "chosen": "\n\nHuman: 1"}, "field 'chosen': ends with a user turn; end it with the response"),
    (Ranking, {"chosen": "yes", "rejected": "no"},
     "field 'chosen': is not a transcript that begins with 'Human:', and there is no 'prompt'; "
     "add the field prompt"),
    (Ranking, {"prompt": "Hi", "chosen": "yes"},
     "field 'rejected': is missing; a pair needs prompt, chosen and rejected"),
    (Ranking, {"chosen": [assistant("yes")], "rejected": [assistant("no")]},
     "field 'prompt': is missing; add the prompt of both responses"),
    (Ranking, {"prompt": "Hi", "chosen": [assistant("a"), user("b"), assistant("c")], "rejected": "no"},
     "field 'chosen': has 3 turns; keep one assistant turn and move the earlier ones to prompt"),
    (Ranking, {**ULTRAFEEDBACK, "completions": [{"response": "a", "overall_score": "N/A"}]},
     "field 'completions[0].overall_score': is 'N/A'; give a number"),
    (Ranking, {**ULTRAFEEDBACK, "completions": ["a"]},
     "field 'completions[0]': is 'a'; write {response, overall_score, ...}"),
    (Ranking, {**SHP, "labels": 2}, "field 'labels': is 2; use 1 where A is preferred, 0 where B is"),
    (Ranking, {**SHP, "human_ref_B": None}, "field 'human_ref_B': is empty; write the text, or remove the row"),
    (Ranking, {"question": "Hi", "answers": ["a", "b"]}, "field 'answers[0]': is 'a'; write {text, pm_score}"),
    (Ranking, {"question": "Hi", "answers": [{"text": "a"}]}, "field 'answers[0].pm_score': is None; give a number"),
    (Ranking, {"question": "Hi", "answers": [{"text": "a", "score": 1}]},
     "field 'responses': is a list of 1; give from 2 to 9"),
    (Ranking, {"question": "Hi", "answers": {"text": ["a", "b"], "score": [1]}},
     "field 'answers': has columns of different lengths; add one entry per answer"),
    (Demonstration, {"instruction": " ", "output": "x"},
     "field 'instruction': is empty; write the text, or remove the row"),
    (Demonstration, HH,
     "the fields chosen, rejected do not match a known layout of a demonstration; it looks like a ranking (HH-RLHF)"),
    (AttributeJudgment, {"prompt": "Hi", "response": "a", "attributes": {}},
     "field 'attributes': is empty; add at least one or remove the row"),
    (AttributeJudgment, {"prompt": "Hi", "response": "a", "attributes": {"kind": "yes"}},
     "field 'attributes.kind': is 'yes'; use a finite number"),
    (RuleJudgment, {"text": "x", "label": None},
     "the fields text do not match a known layout of a rule judgment; use one of: prompt, response, rule, verdict"),
    (Ranking, {"instruction": "Hi", "answer_a": "a", "answer_b": "b"},
     "the fields instruction, answer_a, answer_b do not match a known layout of a ranking"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "message"), [*ERRORS, *PUBLISHED_ERRORS])
def test_errors_name_the_field_of_the_row(kind, row, message):
    assert refusal(convert_row, row, kind).startswith(message.partition(";")[0])


@pytest.mark.parametrize(
    ("prompt", "is_part"),
    [
        ("1", True),
        (" 3\n", True),
        ("2", False),
        ("Hi", False),
        (list(DIALOGUE), True),
        ([user("3")], True),
        ([user("1")], False),
    ],
)
def test_a_prompt_beside_whole_conversations_is_compared_with_them(prompt, is_part):
    row = {"prompt": prompt, **{name: [*DIALOGUE, assistant(name)] for name in ("chosen", "rejected")}}
    for kind in (Ranking, Prompt):
        if is_part:
            (record,) = convert_row(row, kind)[1]
            assert record.prompt == DIALOGUE
        else:
            assert "field 'prompt': differs from the turns" in refusal(convert_row, row, kind)
