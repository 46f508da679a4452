"""`align eval instructions`: measurements by hand, and from prompts in a file to the measurements of two models."""

import pytest

from align.core.errors import UserError
from align.eval.instructions import (
    KINDS,
    Constraint,
    InstructionsConfig,
    instruction_measurements,
    read_constraints,
    run_instructions,
)
from align.eval.results import read_evaluations
from tests.eval.files import stored_rows
from tests.files import write_rows


def test_figures_by_hand():
    """Shares 1, 0.5 and 0: mean 0.5; of the two word counts 0.75."""
    constraints = {"1": Constraint("word_count", 2), "3": Constraint("lowercase"), "4": Constraint("word_count", 5)}
    obeyed = {"1": [True, True], "3": [False, False], "4": [True, False]}
    (measurement,), tables = instruction_measurements(constraints, obeyed)
    assert (measurement.value, measurement.n, measurement.scorer) == (0.5, 3, "checks by program")
    assert 0 <= measurement.low < 0.5 < measurement.high <= 1
    assert tables["By kind of check"] == [
        {"kind": "lowercase", "prompts": 1, "answers that obey": 0.0},
        {"kind": "word_count", "prompts": 2, "answers that obey": 0.75},
    ]


def test_two_models_answer_only_prompts_with_a_check(sharp_folders, tmp_path):
    rows = [{"prompt": "Hi"}, {"prompt": "Say no.", "check": {"kind": "max_words", "value": 99}}, {"prompt": "Who?"}]
    rows.append({"prompt": "One word.", "check": {"kind": "json", "value": ["a"]}})
    models = [sharp_folders["tiny-gpt2"], sharp_folders["tiny-t5"]]
    config = InstructionsConfig(
        models=models,
        prompts=write_rows(tmp_path / "prompts.jsonl", rows),
        samples=2,
        max_new_tokens=6,
        dtype="float32",
        output=str(tmp_path / "out"),
    )
    evaluations = run_instructions(config)
    assert read_evaluations(tmp_path / "out" / "instructions.json") == evaluations
    for evaluation in evaluations:
        stored = stored_rows(tmp_path / "out" / f"instructions-{evaluation.model}.jsonl")
        texts = {item: row["texts"] for item, row in stored.items()}
        assert list(texts) == ["2", "4"]
        by_hand = [sum(bool(text.strip()) and any(map(str.isalnum, text)) for text in texts["2"]) / 2, 0.0]
        assert evaluation.measurements[0].value == pytest.approx(sum(by_hand) / 2)
        assert [row["check"] for row in evaluation.tables["First answers"]] == ["max_words 99", "json ['a']"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "Hi"}], "no prompt has a check"),
        ([{"prompt": "Hi"}, {"prompt": "A", "check": {"kind": "words"}}], "prompt 2: check.kind is 'words'"),
    ],
)
def test_a_file_without_checks_or_with_a_wrong_one(rows, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_constraints(write_rows(tmp_path / "prompts.jsonl", rows))


CASES = [
    ("word_count", 5, "It's a well-known old song.", "It's a very well-known old song."),
    ("max_words", 3, "Drink more water.", "Drink much more water."),
    ("max_words", 3, "Water", "..."),
    ("sentence_count", 2, "It rains. We stay in!", "It rains, we stay in."),
    ("sentence_count", 1, "It rains", "It rains... We stay."),
    ("line_count", 2, "a pillow\n\na cat\n", "a pillow, a cat"),
    ("bullet_count", 2, "- soap\n* towel", "Two things:\n- soap\n- towel"),
    ("bullet_count", 2, "• soap\n• towel", "- soap\n-towel"),
    ("numbered_count", 3, "1. a\n2. b\n3) c", "1. a\n3. b\n2. c"),
    ("numbered_count", 2, "1. tea\n2. milk", "1. tea\n2. milk\n3. juice"),
    ("comma_count", 3, "red, green, blue", "red, green and blue"),
    ("comma_count", 2, "red, blue.", "red,\nblue"),
    ("one_of", ["yes", "no"], "Yes.", "Yes, it is."),
    ("number", None, "1,200", "about 12"),
    ("number", None, "30.", "thirty"),
    ("lowercase", None, "a fish swims.", "A fish swims."),
    ("uppercase", None, "RAIN FALLS!", "123"),
    ("without_letter", "e", "A warm sun.", "The sun"),
    ("without_word", "hot", "Fire burns; a shot.", "It is Hot."),
    ("contains", ["window", "please"], "Please, open the window!", "Open the windows, please."),
    ("starts_with", "Well", "Well, a river flows.", "A river, well."),
    ("ends_with", "?", "Do you ski?", "Do you ski? Tell me."),
    ("ends_with", "the end", "That was The End.", "The end came."),
    ("json", ["name", "age"], '{"age": 7, "name": "Tom"}', '{"name": "Tom", "age": 7, "x": 1}'),
    ("json", ["name"], '{"name": "Tom"}', '```json\n{"name": "Tom"}\n```'),
]


@pytest.mark.parametrize(("kind", "value", "obeys", "disobeys"), CASES)
def test_what_obeys_and_what_does_not(kind, value, obeys, disobeys):
    constraint = Constraint(kind, value)
    assert constraint.obeyed_by(obeys)
    assert not constraint.obeyed_by(disobeys)
    assert not constraint.obeyed_by("  \n")


def test_every_kind_has_a_case():
    assert {kind for kind, *_ in CASES} == set(KINDS)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "word_cuont", "value": 5}, "did you mean word_count"),
        ({"kind": "word_count", "value": "5"}, "check.value of word_count is '5'; it has to be a whole number above 0"),
        ({"kind": "word_count", "value": True}, "a whole number above 0"),
        ({"kind": "one_of", "value": "yes"}, "a list of texts"),
        ({"kind": "lowercase", "value": 1}, "left out"),
        ({"kind": "starts_with"}, "a text"),
        ({"kind": 3}, "not an object of kind and value"),
        ({"kind": "number", "extra": 1}, "not an object of kind and value"),
        ("word_count", "not an object of kind and value"),
    ],
)
def test_a_mistake_in_a_check_is_one_line(check, message):
    with pytest.raises(UserError, match=message):
        Constraint.from_row(check)
