"""CSV files as pandas, `datasets` and spreadsheets write them."""

import datasets
import pandas
import pytest

from align.batches.streams import ExampleStream
from align.data import Demonstration, Prompt, Ranking, check_data, read_records

from .rows import RECORDS, ROWS, assistant, error_of, user

TEXTS = ['He said "no", twice;\nthen left.', "Tab\there", "drei ä\u2028b", "NA", "  spaces  ", "[1, 2]", "x" * 200_000]
HEADER = b"prompt,chosen,rejected\n"


@pytest.mark.parametrize("name", ["rows.csv", "rows.CSV", "rows.csv.gz", "rows.tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_what_pandas_writes_is_read_to_the_character(tmp_path, name, encoding):
    frame = pandas.DataFrame({"prompt": TEXTS, "completion": TEXTS[::-1], "id": range(len(TEXTS))})
    separator = "\t" if ".tsv" in name else ","
    frame.to_csv(tmp_path / name, sep=separator, encoding=encoding, compression="gzip" if name.endswith("gz") else None)
    found = read_records(tmp_path / name, Demonstration)
    assert [record.prompt[0]["content"] for record in found] == TEXTS
    assert [record.continuation[0]["content"] for record in found] == TEXTS[::-1]
    assert [record.id for record in found] == [str(n) for n in range(len(TEXTS))]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_what_spreadsheets_write(tmp_path, separator):
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "rows.csv", sep=separator, index=False, encoding="utf-8-sig", lineterminator="\r\n")
    assert read_records(tmp_path / "rows.csv", Prompt) == RECORDS


def test_what_datasets_writes(tmp_path):
    datasets.Dataset.from_list([{"id": None, "category": None, **row} for row in ROWS]).to_csv(tmp_path / "rows.csv")
    assert read_records(tmp_path / "rows.csv", Prompt) == RECORDS


def test_columns_that_hold_no_text_are_json(tmp_path):
    rows = [{"prompt": "Hi", "responses": '["a", "b"]', "ranks": "[2, 1]", "ratings": "[3, 6]"}]
    pandas.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    expected = Ranking.from_row({"prompt": "Hi", "responses": ["a", "b"], "ranks": [2, 1], "ratings": [3, 6]})
    assert read_records(tmp_path / "rows.csv", Ranking) == [expected]
    pandas.DataFrame([{"prompt": "Hi", "chosen": "5", "rejected": "7", "margin": 1.5}]).to_csv(tmp_path / "b.csv")
    expected = Ranking.from_row({"prompt": "Hi", "responses": ["5", "7"], "ranks": [1, 2], "margin": 1.5})
    assert read_records(tmp_path / "b.csv", Ranking) == [expected]
    turns = [{"messages": '[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]'}]
    pandas.DataFrame(turns).to_csv(tmp_path / "c.csv")
    assert read_records(tmp_path / "c.csv", Demonstration) == [
        Demonstration(prompt=(user("1"),), continuation=(assistant("2"),))
    ]


def test_rows_are_checked_as_in_other_files(tmp_path):
    path = tmp_path / "rows.csv"
    pandas.DataFrame([{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": False}]
                     ).to_csv(path, index=False)  # fmt: skip
    assert error_of(path, Demonstration).startswith(f"{path}: row 2: field 'label': is False, which marks an answer not to")
    path.write_bytes(HEADER + b"a,b,c\n\nd,e\nf,g,h\n")
    wrong = f"{path}: row 2: has 2 cells, and the header has 3; put cells with ',' in quotes"
    assert error_of(path, Ranking) == wrong
    assert len(read_records(path, Ranking, skip_bad_rows=True)) == 2
    assert check_data(str(path)).endswith(f"bad rows:              1 of 3 (33.3 %)\n  {wrong}")
    path.write_bytes(HEADER + b"a,b,\n")
    assert error_of(path, Ranking) == f"{path}: row 1: field 'rejected': is missing; a pair has prompt, chosen and rejected"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEADER + "ä,b,c\n".encode("cp1252"), "not UTF-8 (byte 0xe4); save it as CSV UTF-8"),
        (HEADER + b'"a,b,c\n', "broken CSV (unexpected end of data); write it again, with quotes inside of cells doubled"),
        (b"prompt,chosen,chosen\na,b,c\n", "the header has the column 'chosen' twice; rename one"),
        (HEADER, "has no rows; write one record per line"),
        (b"", "the file is empty; write one record per line"),
    ],
)
def test_broken_files(tmp_path, data, message):
    (tmp_path / "rows.csv").write_bytes(data)
    assert error_of(tmp_path / "rows.csv", Ranking) == f"{tmp_path / 'rows.csv'}: {message}"


def test_csv_can_be_streamed(tmp_path):
    class Alone:
        num_processes, process_index = 1, 0

    pandas.DataFrame({"prompt": [str(n) for n in range(10)]}).to_csv(tmp_path / "rows.csv", index=False)
    stream = ExampleStream(str(tmp_path / "rows.csv"), lambda row: [row.row["prompt"]], list, 4, (0, 0), Alone)
    assert sorted(stream.take(10)) == [str(n) for n in range(10)]
