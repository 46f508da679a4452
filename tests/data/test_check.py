import pytest

from align.cli import main
from align.core.errors import UserError
from align.data import AttributeJudgment, Demonstration, Prompt, Ranking, RuleJudgment, check_data, read_records
from align.data.check import convert_data, guess_kind
from tests.files import write_rows

TURNS = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
]
RANKINGS = [
    {"prompt": "a b c", "responses": ["x", "y z"], "ranks": [1, 2], "category": "chat"},
    {"prompt": "a b c", "responses": ["x", "y", "z w"], "ranks": [1, 1, 2], "category": "chat"},
    {"prompt": TURNS, "chosen": "x", "rejected": "y", "category": "code"},
    {"prompt": "a", "responses": ["x", "y"], "ranks": [0, 1]},
]


@pytest.fixture
def write(tmp_path):
    return lambda rows: write_rows(tmp_path / "rows.jsonl", rows)


def test_rankings(write):
    path = write(RANKINGS)
    assert check_data(path).splitlines() == [
        f"source:                {path}",
        "kind:                  ranking",
        "layout:                ranking (2 rows), pair (1 row)",
        "records:               3 from 4 rows",
        "multi-turn:            1 of 3 (33.3 %)",
        "responses per ranking: 2: 2, 3: 1",
        "tied pairs:            1 of 5 (20.0 %)",
        "words in the prompt:   min 3, median 3, mean 3.3, 95th percentile 4, max 4",
        "words in a response:   min 1, median 1, mean 1.3, 95th percentile 2, max 2",
        "categories:            chat 2, code 1",
        "repeated prompts:      1 of 3 (33.3 %)",
        "example 1:             user: a b c",
        "                       rank 1: x",
        "                       rank 2: y z",
        "example 2:             user: a b c",
        "                       rank 1: x",
        "                       rank 1: y",
        "                       rank 2: z w",
        "bad rows:              1 of 4 (25.0 %)",
        f"  {path}:4: field 'ranks[0]': is 0; use a whole number of 1 or more",
    ]


def test_demonstrations(write):
    text = check_data(write([{"messages": [*TURNS, {"role": "assistant", "content": "five six"}]}]))
    assert "kind:                  demonstration\n" in text
    assert "multi-turn:            1 of 1 (100.0 %)\n" in text
    assert "words in a response:   min 1, median 1, mean 1.5, 95th percentile 2, max 2\n" in text
    assert "categories:            none\n" in text
    assert text.endswith("bad rows:              none")


def test_facts_of_responses_of_rule_judgments_and_of_ratings(write):
    text = check_data(write([{"prompt": "a", "responses": ["b", " ", ""], "ranks": [1, 2, 2]}]))
    assert "empty responses:       2 of 3 (66.7 %)\n" in text
    row = {"prompt": "a", "response": "b", "rule": "polite", "verdict": "follows"}
    text = check_data(write([row, {**row, "verdict": "violates"}, row]))
    assert "verdicts:              follows 2, violates 1\n" in text
    assert "rules:                 polite 3\n" in text
    assert "empty responses" not in text
    rows = [{"prompt": prompt, "response": text, "rating": 1} for prompt, text in ("ab", "ac", "bd")]
    assert "skipped:               1 prompt with a single rated response\n" in check_data(write(rows))


def test_many_categories_and_bad_rows_are_cut_short(write):
    rows = [{"prompt": "a", "category": f"c{i:02}"} for i in range(12)] + [{"prompt": ""}] * 7
    text = check_data(write(rows), "prompt")
    assert "c09 1, and 2 more\n" in text
    assert text.endswith("\n  and 2 more")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"prompt": "a", "completion": "b"}, "demonstration"),
        ({"prompt": "a", "messages": [], "chosen": [], "rejected": []}, "ranking"),
        ({"prompt": "a", "response": "b", "rule": "r", "verdict": "follows"}, "rule judgment"),
    ],
)
def test_the_kind_is_guessed_from_the_first_known_row(write, row, kind):
    assert guess_kind(write(["junk", {"x": 1}, row])) == kind


def test_the_kind_can_be_named(write):
    path = write([{"prompt": "a", "response": "b", "rule": "polite", "verdict": "follows"}])
    for name in ("rule judgment", "rule-judgment", "Rule_Judgment"):
        assert check_data(path, name) == check_data(path)


def test_errors(write):
    with pytest.raises(UserError, match=r"^unknown record type 'rankings'; use one of demonstration, "):
        check_data(write(RANKINGS), "rankings")
    with pytest.raises(UserError, match=r"no known layout has the columns x;.* rename columns: FILE\["):
        check_data(write([{"x": 1}]))
    with pytest.raises(UserError, match="no usable demonstration; 1 of 1 rows are invalid, the first: "):
        check_data(write([{"x": 1}]), "demonstration")


def test_the_first_mistake_in_a_table_is_named_where_no_row_can_be_read(tmp_path):
    sheet = tmp_path / "answers.csv"
    sheet.write_text("question,first\nWhy?,So.\n")
    with pytest.raises(UserError, match=r"answers.csv: row 1: no column 'questoin'; did you mean question\?"):
        check_data(f"{sheet}[prompt=questoin, completion=first]")
    sheet.write_text("My study\nquestion,first\nWhy?,So.\n")
    with pytest.raises(UserError, match="row 1: has 2 cells"):
        check_data(str(sheet))
    sheet.write_text("question,first\n")
    with pytest.raises(UserError, match="no rows; write one record per line"):
        check_data(str(sheet))


JUDGED = {"prompt": "a", "response": "b"}
EXAMPLES = [
    ({"prompt": "a\nb", "completion": "c"}, ["user: a b", "* assistant: c"]),
    ({"input_ids": [5, 6]}, ["token ids: 5 6"]),
    ({**JUDGED, "rule": "polite", "verdict": "unsure"}, ["user: a", "response: b", "rule polite: unsure"]),
    ({**JUDGED, "attributes": {"kind": 1, "depth": 2.5}}, ["user: a", "response: b", "attributes: kind 1, depth 2.5"]),
    ({"prompt": "x" * 100}, [f"user: {'x' * 84}..."]),
    ({"prompt": "a", "responses": list("bcdefghij"), "ranks": range(1, 10)},
     ["user: a", *(f"rank {n}: {text}" for n, text in enumerate("bcdefgh", 1)), "and 2 more"]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "shown"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_first_records_are_shown(write, row, shown):
    row = {name: list(value) if isinstance(value, range) else value for name, value in row.items()}
    text = check_data(write([row, row, row]))
    example = "\n".join(f"{'' if n else 'example 2:':<23}{line}" for n, line in enumerate(shown))
    assert f"\n{example}\nbad rows:" in text
    assert "example 3" not in text


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, Demonstration),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}, Ranking),
        ({"question": "a"}, Prompt),
        ({"input_ids": [5, 6]}, Prompt),
        ({**JUDGED, "rule": "polite", "verdict": "unsure"}, RuleJudgment),
        ({**JUDGED, "attributes": {"kind": 1}}, AttributeJudgment),
    ],
)
def test_conversion_keeps_the_records(write, tmp_path, capsys, row, kind):
    source, output = write([row]), str(tmp_path / "out.jsonl")
    if "question" in row:
        source += "[prompt=question]"
    main(["data", "convert", source, output])
    name = {RuleJudgment: "rule judgment", AttributeJudgment: "attribute judgment"}.get(kind, kind.__name__.lower())
    assert capsys.readouterr().out == f"{output}: 1 record of type {name}\n"
    assert read_records(output, kind, token_ids=True) == read_records(source, kind, token_ids=True)


def test_conversion_stops_at_a_bad_row_or_leaves_it_out(write, tmp_path):
    source, output = write([{"prompt": "a"}, {"prompt": ""}]), tmp_path / "out.jsonl.gz"
    with pytest.raises(UserError, match=r"rows.jsonl:2: field 'prompt': is empty"):
        convert_data(source, output)
    assert not output.exists()
    assert convert_data(source, output, skip_bad_rows=True) == f"{output}: 1 record of type prompt"
    before = output.read_bytes()
    with pytest.raises(UserError, match="already exists"):
        convert_data(source, output, skip_bad_rows=True)
    assert output.read_bytes() == before
    source, output = write([{"prompt": "a", "note": "b"}, {"prompt": "c", "note": "d", "more": 1}]), tmp_path / "out.jsonl"
    assert convert_data(source, output).splitlines()[1] == "unused columns: note, more (1 row)"
