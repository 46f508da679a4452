import json
import random

import pytest

from align.commands.tools import data_command
from align.data.check import find_overlap
from tests.files import write_rows

NINETEEN = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen end"
)
WORDS = NINETEEN.split()


@pytest.fixture
def compare(tmp_path):
    def compare(training, evaluation):
        for name, rows in (("a.jsonl", training), ("b.jsonl", evaluation)):
            write_rows(tmp_path / name, rows)
        return find_overlap(tmp_path / "a.jsonl", tmp_path / "b.jsonl")

    return compare


def places(found):
    return [(match.evaluation.rsplit("/", 1)[-1], match.training.rsplit("/", 1)[-1]) for match in found.matches]


def test_thirteen_words_are_found_in_any_layout_case_and_punctuation(compare):
    training = [
        {"text": "nothing"},
        {"messages": [{"role": "user", "content": "So: " + ", ".join(WORDS[:13]).upper() + "!"}]},
    ]
    evaluation = [{"prompt": "free"}, {"prompt": "Q", "responses": ["x", " ".join(WORDS[:13]) + " and more"]}]
    found = compare(training, evaluation)
    assert places(found) == [("b.jsonl:2", "a.jsonl:2")]
    assert found.matches[0].words == " ".join(WORDS[:13])
    assert (found.rows, found.too_short, found.training_rows) == (2, 1, 2)


def test_what_is_not_shared_or_too_short_is_no_match(compare):
    assert not compare([{"text": " ".join(WORDS[:12])}], [{"text": NINETEEN}]).matches
    training = [{"prompt": " ".join(WORDS[:7]), "completion": " ".join(WORDS[7:14])}]
    assert not compare(training, [{"text": " ".join(WORDS[:14])}]).matches
    nine = " ".join(WORDS[:9])
    assert len(compare([{"text": f"before {nine} after"}], [{"prompt": nine}]).matches) == 1
    assert not compare([{"text": " ".join(WORDS[:8])}], [{"prompt": nine}]).matches
    found = compare([{"text": NINETEEN}], [{"prompt": " ".join(WORDS[:7])}])  # seven words prove nothing
    assert (found.matches, found.too_short) == ([], 1)


def test_a_template_that_many_rows_share_is_no_alarm(compare):
    training = [{"text": f"{NINETEEN} {number}"} for number in range(11)]
    found = compare(training, [{"text": f"{NINETEEN} new"}])
    assert (found.matches, found.frequent) == ([], 7)
    assert len(compare(training[:10], [{"text": f"{NINETEEN} new"}]).matches) == 1


def test_false_alarms_on_texts_of_the_same_words(compare):
    """3,000 training and 500 evaluation sentences of 40 words, drawn independently from the same 200: no alarm, and each
    of 25 planted copies is found."""
    generator = random.Random(0)
    words = [f"w{number}" for number in range(200)]

    def sentence():
        return " ".join(generator.choices(words, k=40))

    training = [{"text": sentence()} for _ in range(3000)]
    evaluation = [{"text": sentence()} for _ in range(500)]
    assert not compare(training, evaluation).matches
    for number in range(25):
        evaluation[20 * number] = {"text": f"{sentence()} {training[number]['text'][40:120]}"}
    assert [place for place, _ in places(compare(training, evaluation))] == [f"b.jsonl:{20 * n + 1}" for n in range(25)]


def test_what_the_shipped_files_share():
    """What a model is measured by is in no training file."""
    written, sampled = ("demonstrations", "rankings"), ("rankings_round1", "rankings_round2")
    held_out = ("prompts_heldout", "rankings_heldout", "demonstrations_heldout", "truthfulness")
    of_rounds = ("prompts_heldout", "rankings_round1_heldout", "rankings_round2_heldout", "truthfulness")
    pairs = [(one, evaluation) for one in written for evaluation in held_out]
    pairs += [(one, evaluation) for one in sampled for evaluation in of_rounds]
    found = {pair: find_overlap(*(f"data/{name}.jsonl" for name in pair)).matches for pair in pairs}
    assert not any(found.values()), found


def test_the_command_lists_the_rows(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": NINETEEN}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": NINETEEN}) + "\n" + json.dumps({"prompt": "Hi"}) + "\n")
    data_command(["check", str(tmp_path / "a.jsonl"), "--against", str(tmp_path / "b.jsonl")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("shared:        1 of 1 rows (100.0 %) share 13 ")
    assert shown[3].startswith(f"  {tmp_path}/b.jsonl:1 with {tmp_path}/a.jsonl:1: ")
