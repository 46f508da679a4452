import csv
import datetime
import io
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import pandas
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from align.batches.mixtures import mixture_of
from align.core.errors import UserError
from align.core.settings_parser import parse
from align.data import Demonstration, Prompt, Ranking, check_data, read_records
from align.data.fields import SCORES
from align.data.sources import iter_rows
from align.data.tables import csv_rows
from align.reward import RewardConfig
from tests.data.rows import HI, assistant, error_of, lines, user, write_parquet

OWN = [
    {"question": "Hi", "first answer": "a", "second answer": "b", "better": "B"},
    {"question": "Hi", "first answer": "c", "second answer": "NA", "better": "tie"},
]
COLUMNS = "[prompt=question, response_a=first answer,response_b = second answer, preferred=better]"
EXPECTED = [
    Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1)),
    Ranking(prompt=HI, responses=("c", "NA"), ranks=(1, 1)),
]


def write_excel(path, rows):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(path)


def write_own(path):
    frame = pandas.DataFrame(OWN)
    if path.suffix == ".xlsx":
        write_excel(path, [list(OWN[0]), *(list(row.values()) for row in OWN)])
    elif path.suffix == ".parquet":
        write_parquet(path, OWN)
    elif path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    else:
        path.write_bytes(json.dumps(OWN).encode() if path.suffix == ".json" else lines(OWN))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet", "a.xlsx"])
def test_columns_are_read_as_fields(tmp_path, name):
    path = tmp_path / name
    write_own(path)
    assert read_records(f"{path}{COLUMNS}", Ranking) == EXPECTED
    found = error_of(f"{path}[prompt=qestion]")
    assert found.startswith(f"{path}")
    assert found.endswith(": no column 'qestion'; did you mean question?")
    assert error_of(f"{path}[prompt=question, id=xyzzy]").endswith(
        ": no column 'xyzzy'; it has question, first answer, second answer, better"
    )


def test_columns_of_several_sources_with_weights_of_a_settings_file_and_of_a_folder(tmp_path):
    write_own(tmp_path / "a.csv")
    source = f"{tmp_path}/a.csv{COLUMNS}"
    assert read_records(f"{source}, {source}", Ranking) == EXPECTED * 2
    mixture = mixture_of(f"{source}, {source}=2")
    assert (mixture.sources, mixture.weights) == ((source, source), (1.0, 2.0))
    (tmp_path / "a.yaml").write_text(f"train_data: {source}\n", encoding="utf-8")
    assert read_records(parse(RewardConfig, ["--config", str(tmp_path / "a.yaml")]).train_data, Ranking) == EXPECTED
    (tmp_path / "folder").mkdir()
    write_own(tmp_path / "folder" / "train.jsonl")
    assert read_records(f"{tmp_path}/folder{COLUMNS}", Ranking) == EXPECTED
    assert [row.row["prompt"] for row in iter_rows(f"{tmp_path}/folder[prompt=better]")] == ["B", "tie"]


def test_a_renamed_column_takes_the_place_of_the_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"prompt": "old", "question": "Hi", "score": 3}]))
    assert read_records(f"{path}[prompt=question, id=question]", Prompt) == [Prompt(prompt=HI, id="Hi")]
    assert "unused columns:        score\n" in check_data(f"{path}[prompt=question]")


def test_a_file_has_no_split_and_no_subset_and_an_existing_path_no_options(tmp_path):
    path = tmp_path / "a[prompt=x].jsonl"
    path.write_bytes(lines([{"prompt": "Hi"}]))
    assert read_records(path, Prompt) == [Prompt(prompt=HI)]
    for name, value in (("split", "test"), ("subset", "en")):
        (tmp_path / "a.jsonl").write_bytes(lines([{"prompt": "Hi"}]))
        source = f"{tmp_path}/a.jsonl[{name}={value}]"
        assert error_of(source).startswith(f"{source}: files have no {name}; remove {name}={value}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("[question]", "'question'; use [FIELD=COLUMN, ...]"),
        ("[]", "''; use [FIELD=COLUMN, ...]"),
        ("[prompt=a, prompt=b]", "prompt is set twice"),
    ],
)
def test_broken_options(options, message):
    assert message in error_of(f"a.csv{options}")


def test_lists_that_pandas_wrote_as_python_are_named_and_a_choice_may_be_a_float(tmp_path):
    turns = [user("q"), assistant("a")]
    for row, message in (
        (
            {"prompt": turns[:1], "chosen": "a", "rejected": "b"},
            "'prompt': is a string that contains a list of turns;",
        ),
        ({"chosen": turns, "rejected": turns, "prompt": "q"}, "'chosen': is a string that contains a list of turns;"),
        (
            {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]},
            "list, not \"['a', 'b']\"; write it as JSON,",
        ),
    ):
        pandas.DataFrame([row]).to_csv(tmp_path / "a.csv", index=False)
        assert message in error_of(tmp_path / "a.csv", Ranking)
    for text in ('[{"role": "user", "content": "Hi"}] is what?', '[{"value": 3}]', '[{"role": "user", "name": "Al"}]'):
        assert Prompt.from_row({"prompt": text}).prompt == (user(text),)
    choices = pandas.DataFrame({"prompt": "Hi", "response_a": "a", "response_b": "b", "preferred": [1.0, 2.0]})
    choices.to_csv(tmp_path / "b.csv", index=False)
    assert [found.ranks for found in read_records(tmp_path / "b.csv", Ranking)] == [(1, 2), (2, 1)]


def test_ratings_of_a_spreadsheet(tmp_path):
    pandas.DataFrame({"q": ["Hi", "Hi"], "a": ["a", "b"], "stars": [2.5, 5]}).to_csv(tmp_path / "a.csv", index=False)
    (found,) = read_records(f"{tmp_path}/a.csv[prompt=q, response=a, rating=stars]", Ranking)
    assert found == Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1))


def test_cells_of_excel_are_their_text(tmp_path):
    path = tmp_path / "a.xlsx"
    rows = [[None, "prompt", "chosen", "rejected", "margin"], ["x", "Hi", 42.0, "None", 1.5], [None] * 5]
    write_excel(path, [*rows, ["y", "Hi", True, datetime.date(2026, 11, 25)], [None, "Hi", 0.5, "NA", 2]])
    assert read_records(path, Ranking) == [
        Ranking(prompt=HI, responses=("42", "None"), ranks=(1, 2), margin=1.5),
        Ranking(prompt=HI, responses=("TRUE", "2026-11-25T00:00:00"), ranks=(1, 2)),
        Ranking(prompt=HI, responses=("0.5", "NA"), ranks=(1, 2), margin=2.0),
    ]


def test_broken_excel_files(tmp_path):
    path = tmp_path / "a.xlsx"
    write_excel(path, [["prompt"], ["Hi"], ["#REF!"]])
    assert error_of(path).startswith(f"{path}: row 2: cell A3 contains the error #REF!")
    write_excel(path, [["prompt", "id"], ["Hi", "1", None, "lost"]])
    assert error_of(path).startswith(f"{path}: row 1: has 4 cells")
    write_excel(path, [["prompt", "prompt"], ["Hi", "Hi"]])
    assert error_of(path).startswith(f"{path}: duplicate column 'prompt'")
    path.write_bytes(b"PK or so")
    assert error_of(path).startswith(f"{path}: invalid Excel file (")


def test_all_rows_of_excel_are_read_where_the_stated_size_is_wrong(tmp_path):
    right, wrong = tmp_path / "right.xlsx", tmp_path / "wrong.xlsx"
    write_excel(right, [["prompt", "id"], ["Hi", "1"], ["Hello", "2"], ["Hey", "3"]])
    with zipfile.ZipFile(right) as source, zipfile.ZipFile(wrong, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b'<dimension ref="A1:B4"', b'<dimension ref="A1:A2"'))
    assert wrong.read_bytes() != right.read_bytes()
    assert [record.id for record in read_records(wrong, Prompt)] == ["1", "2", "3"]


@pytest.mark.parametrize("pair", SCORES, ids="/".join)
@pytest.mark.parametrize("ending", ["csv", "xlsx"])
def test_scores_of_a_table_are_compared(tmp_path, pair, ending):
    path = tmp_path / f"a.{ending}"
    rows = [["prompt", "chosen", "rejected", *pair], ["Hi", "a", "b", 1, 10]]
    if ending == "xlsx":
        write_excel(path, rows)
    else:
        pandas.DataFrame(rows[1:], columns=rows[0]).to_csv(path, index=False)
    with pytest.raises(UserError, match=f"field '{pair[1]}': is 10, higher than {pair[0]}"):
        read_records(path, Ranking)


def test_excel_without_its_library(tmp_path, monkeypatch):
    (tmp_path / "a.xlsx").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    command = "pip install -c constraints.txt -e '.[xlsx]'"
    remedy = f"save the sheet as CSV UTF-8, or install the extra xlsx in the clone: {command}"
    assert error_of(tmp_path / "a.xlsx") == f"{tmp_path}/a.xlsx: Excel files need openpyxl; {remedy}"


HEADERS = st.text(st.sampled_from('ab ,;\t"\n\r'), min_size=1, max_size=8).filter(lambda name: name.strip(" \n\r\t") != "")
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(HEADERS, min_size=2, max_size=4), st.sampled_from(",;\t|"), st.booleans(), st.data())
def test_any_header_and_any_cell_are_read(headers, separator, is_named, data):
    """Cells in quotes may hold separators, quotes and line breaks, in the header too, and Excel names its separator."""
    names = [re.sub(r"\s*[\r\n]+\s*", " ", name.strip()) for name in headers]
    assume(len(set(names)) == len(names) and all(names))
    is_named = is_named or separator == "|"
    rows = data.draw(st.lists(st.lists(CELLS, min_size=len(names), max_size=len(names)), min_size=1, max_size=3))
    text = io.StringIO()
    csv.writer(text, delimiter=separator, quoting=csv.QUOTE_ALL).writerows([headers, *rows])
    content = (f"sep={separator}\r\n" if is_named else "") + text.getvalue()
    found = list(csv_rows(io.BytesIO(content.encode()), "a.csv"))
    assert found == [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize("first", ["sep=;\n", "SEP=;\r\n", '"sep=;"\n', "\ufeffsep=;\r\n"])
def test_a_first_line_that_names_the_separator_is_no_header(tmp_path, first):
    (tmp_path / "a.csv").write_bytes(f'{first}prompt;chosen;rejected\n"a,b,c,d";e;f\n"g;h;i\n'.encode())
    assert "a.csv:4: invalid CSV" in error_of(tmp_path / "a.csv", Ranking)
    (tmp_path / "a.csv").write_bytes(f"{first}prompt;chosen;rejected\na,b,c,d;e;f\n".encode())
    (found,) = read_records(tmp_path / "a.csv", Ranking)
    assert (found.prompt, found.responses) == ((user("a,b,c,d"),), ("e", "f"))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(JSON_VALUES)
def test_an_answer_in_json_is_text(value):
    text = json.dumps(value, ensure_ascii=False)
    assume(text.strip() and not isinstance(value, str))
    content = io.StringIO()
    csv.writer(content).writerows([["prompt", "completion"], ["Give JSON", text]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_bytes(content.getvalue().encode())
        (found,) = read_records(path, Demonstration)
    assert found.continuation == (assistant(text),)


def test_turns_in_cells_are_turns(tmp_path):
    turns = json.dumps([user("Hi"), assistant("Yo"), user("Bye")])
    (tmp_path / "a.csv").write_text(f'prompt,completion\n"{turns.replace(chr(34), chr(34) * 2)}",x\n')
    (found,) = read_records(tmp_path / "a.csv", Demonstration)
    assert found.prompt == (user("Hi"), assistant("Yo"), user("Bye"))
