import json

import pytest

from align.batches.encoding import Limits, encode_demonstrations
from align.core.errors import UserError
from align.data import check_data
from align.data.formats import convert_row
from align.data.records import Demonstration, Prompt, Ranking, RuleJudgment
from tests.data.rows import ALPACA, BINARIZED, DOLLY, HI, SHP, assistant, error_of, lines, system, user

EARLIER = (user("1"), assistant("2"))
ANSWERED = {"prompt": "Hi", "completion": "Yo"}
PAIR = {"prompt": "Hi", "chosen": "yes", "rejected": "no"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}

BEFORE = [
    ({**ALPACA, "system": "Be brief."}, (system("Be brief."), user("Sort.\n\nb a"))),
    ({**ALPACA, "system": "Be brief.", "history": [["1", "2"]]}, (system("Be brief."), *EARLIER, user("Sort.\n\nb a"))),
    ({**DOLLY, "system_prompt": "Be brief."}, (system("Be brief."), user("When?"))),
    ({**ANSWERED, "system": "Be brief."}, (system("Be brief."), *HI)),
    ({**ANSWERED, "history": [user("1"), assistant("2")]}, (*EARLIER, *HI)),
    ({**ANSWERED, "system": "", "history": []}, HI),
    ({**ANSWERED, "system": None, "history": None}, HI),
    ({"messages": [user("Hi"), assistant("Yo")], "system": "s"}, (system("s"), *HI)),
    ({"messages": [system("s"), user("Hi"), assistant("Yo")], "system": "s"}, (system("s"), *HI)),
    ({"messages": [system("s"), user("Hi"), assistant("Yo")], "history": [["1", "2"]]}, (system("s"), *EARLIER, *HI)),
]


@pytest.mark.parametrize(("row", "prompt"), BEFORE, ids=range(len(BEFORE)))
def test_system_and_history_become_turns(row, prompt):
    (demonstration,) = convert_row(row, Demonstration)[1]
    assert demonstration.prompt == prompt
    assert convert_row(row, Prompt)[1][0].prompt == prompt


def test_system_and_history_of_other_kinds():
    row = {**PAIR, "system": "s", "history": [["1", "2"]]}
    prompt = (system("s"), *EARLIER, *HI)
    assert convert_row(row, Ranking)[1] == [Ranking(prompt=prompt, responses=("yes", "no"), ranks=(1, 2))]
    judged = {"prompt": "Hi", "response": "a", "rule": "r", "verdict": "follows", "system": "s"}
    assert convert_row(judged, RuleJudgment)[1][0].prompt == (system("s"), *HI)
    assert convert_row(SHP, Ranking)[1][0].prompt == HI  # its history is the post itself


def flags(*pairs):
    """Turns 1, 2, ...: user and assistant in turn, the assistant's with the given extra fields."""
    turns = [{**turn, **more} for n, more in enumerate(pairs) for turn, more in
             ((user(f"{2 * n + 1}"), {}), (assistant(f"{2 * n + 2}"), more))]  # fmt: skip
    return {"messages": turns}


def parts(row):
    """The prompt and the continuation of each demonstration, as the numbers of their turns."""
    return [
        ["".join(turn["content"] for turn in turns) for turns in (record.prompt, record.continuation)]
        for record in convert_row(row, Demonstration)[1]
    ]


@pytest.mark.parametrize("no", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}, {"weight": 0.0}])
def test_turns_that_are_excluded_from_the_loss_are_only_read(no):
    yes = {name: type(value)(1) for name, value in no.items()}
    assert parts(flags({}, yes, {})) == [["1", "23456"]]
    assert parts(flags(no, yes)) == [["123", "4"]]
    assert parts(flags(yes, no)) == [["1", "2"]]
    assert parts(flags(yes, no, {})) == [["1", "2"], ["12345", "6"]]
    assert parts(flags(no, yes, {}, no, yes, no)) == [["123", "456"], ["123456789", "10"]]
    with pytest.raises(UserError, match="field 'messages':"):
        parts(flags(no, no))


def test_turns_of_a_completion_can_be_excluded():
    turns = [{**assistant("2"), "weight": 0}, user("3"), assistant("4")]
    assert parts({"prompt": "1", "completion": turns}) == [["123", "4"]]


def test_only_the_tokens_of_learned_turns_are_in_the_loss(load_sharp, tiny_name):
    loaded = load_sharp(tiny_name)
    rows = [flags({}, {"weight": 0}, {}, {})]
    found = encode_demonstrations(rows, loaded, Limits(500, 500), False)
    learned = [token for e in found for token, counts in zip(e.response, e.loss_mask, strict=True) if counts]
    assert learned == [token for text in ("2", "6", "8") for token in loaded.tokenization.response_ids(text)]


REFUSED = [
    (Demonstration, {**ANSWERED, "label": False},
     "field 'label': is False, which marks an answer that must not be imitated"),
    (Demonstration, {**ANSWERED, "kto_tag": False},
     "field 'kto_tag': is False, which marks an answer that must not be imitated"),
    (Demonstration, {**ANSWERED, "label": 0}, "field 'label': is 0, which marks an answer that must not be imitated"),
    (Demonstration, {**ANSWERED, "weight": 0}, "field 'weight': is 0, so the row must not be trained on"),
    (Ranking, {**PAIR, "weight": 0.5}, "field 'weight': is 0.5"),
    (Demonstration, flags({"weight": 0.5}),
     "field 'messages[1].weight': is 0.5"),
    (Demonstration, flags({"train": "no"}),
     "field 'messages[1].train': is 'no"),
    (Ranking, {**PAIR, "score_chosen": 2, "score_rejected": 7.5},
     "field 'score_rejected': is 7.5, higher than score_chosen (2)"),
    (Ranking, {**PAIR, "score_chosen": "2", "score_rejected": " 10"},
     "field 'score_rejected': is 10.0, higher than score_chosen (2.0)"),
    (Ranking, {**BINARIZED, "score_chosen": 5.5, "score_rejected": 8.0},
     "field 'score_rejected': is 8.0, higher than score_chosen (5.5)"),
    (Ranking, {"instruction": "Hi", "chosen_response": "a", "rejected_response": "b", "chosen_avg_rating": 2.0,
               "rejected_avg_rating": 4.5},
     "field 'rejected_avg_rating': is 4.5, higher than chosen_avg_rating (2.0)"),
    (Demonstration, {**ANSWERED, "system": ["s"]}, "field 'system':"),
    (Demonstration, {**ANSWERED, "system": "a", "system_prompt": "b"},
     "field 'system_prompt': differs from 'system'; keep one of them"),
    (Demonstration, {"messages": [system("a"), user("Hi"), assistant("Yo")], "system": "b"},
     "field 'system': differs from the system turn of the conversation; keep one of them"),
    (Prompt, {"prompt": "Hi", "history": "1"}, "field 'history': must be a list, not '1'; write it as [..., ...]"),
    (Prompt, {"prompt": "Hi", "history": ["1", "2"]},
     "field 'history[0]': is '1"),
    (Prompt, {"prompt": "Hi", "history": [user("1")]},
     "field 'history[1]':"),
]  # fmt: skip
UNREADABLE = [
    ("tools", [CALL]), ("tools", json.dumps([CALL])), ("functions", [CALL]), ("images", ["a.png"]), ("image", "a.png"),
    ("videos", ["a.mp4"]), ("audio", {"path": "a.wav"}), ("chat_template_kwargs", {"enable_thinking": True}),
    ("reasoning_content", "Hm."),
]  # fmt: skip
UNREADABLE_TURNS = [
    ("tool_calls", [CALL]), ("function_call", CALL["function"]), ("tool_call_id", "7"), ("reasoning_content", "Hm."),
    ("thinking", "Hm."), ("images", ["a.png"]), ("train_detail", [{"begin_offset": 0}]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_meant_is_refused_with_file_line_and_field(tmp_path, kind, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([row]))
    assert error_of(path, kind).startswith(f"{path}:1: {message.partition(';')[0]}")


@pytest.mark.parametrize(("field", "value"), UNREADABLE)
def test_rows_that_need_more_than_text_are_refused(field, value):
    message = f"^field '{field}': is not supported and changes the meaning of the row; remove the row, or the field if"
    for kind, row in ((Demonstration, ANSWERED), (Ranking, PAIR), (Demonstration, ALPACA)):
        with pytest.raises(UserError, match=message):
            convert_row({**row, field: value}, kind)
    if field != "reasoning_content":  # it belongs to an answer
        with pytest.raises(UserError, match=message):
            convert_row({"prompt": "Hi", field: value}, Prompt)


@pytest.mark.parametrize(("field", "value"), UNREADABLE_TURNS)
def test_turns_that_need_more_than_text_are_refused(field, value):
    turns = [user("Hi"), {**assistant("Yo"), field: value}]
    with pytest.raises(
        UserError, match=rf"^field 'messages\[1\].{field}': is not supported and changes the meaning of the turn"
    ):
        convert_row({"messages": turns}, Demonstration)
    with pytest.raises(
        UserError, match=rf"^field 'chosen\[0\].{field}': is not supported and changes the meaning of the turn"
    ):
        convert_row({**PAIR, "chosen": turns[1:]}, Ranking)


@pytest.mark.parametrize("empty", [None, "", "[]", [], {}, [None], False])
def test_empty_fields_change_nothing(empty):
    row = {"messages": [user("Hi"), {**assistant("Yo"), "tool_calls": empty}], "tools": empty, "images": empty}
    assert convert_row(row, Demonstration)[1] == [Demonstration(prompt=HI, continuation=(assistant("Yo"),))]


def test_true_labels_and_ordered_scores_are_read():
    expected = [Demonstration(prompt=HI, continuation=(assistant("Yo"),))]
    assert convert_row({**ANSWERED, "label": True, "kto_tag": True, "weight": 1}, Demonstration)[1] == expected
    for scores in ((7, 2), ("10", "2"), ("good", "bad"), ("nan", "2")):
        assert convert_row({**PAIR, "score_chosen": scores[0], "score_rejected": scores[1]}, Ranking)[1][0].ranks == (1, 2)
    assert convert_row({**PAIR, "score_chosen": "7", "score_rejected": 7.0}, Ranking)[1][0].ranks == (1, 1)
    assert convert_row({**ANSWERED, "label": False}, Prompt)[1] == [Prompt(prompt=HI)]


def test_columns_that_are_not_used_are_named(tmp_path):
    path = tmp_path / "stars.jsonl"
    rows = [{"prompt": "a", "answer": "b", "stars": 5, "note": None}, {"prompt": "c", "answer": "d"}]
    path.write_bytes(lines(rows))
    assert "unused columns:        answer, stars (1 row)\n" in check_data(str(path))
    path.write_bytes(lines([{"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2], "margin": 1, "source": "s"}]))
    assert "unused columns:        source\n" in check_data(str(path))
    path.write_bytes(lines([{"messages": [user("a"), assistant("b")], "id": "1", "category": "c", "tools": []}]))
    assert "unused columns" not in check_data(str(path))
    path.write_bytes(lines([{"prompt": "\n\nHuman: a\n\nAssistant:", "answer": "b"}]))
    assert "unused columns:        answer\n" in check_data(str(path))
