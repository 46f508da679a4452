import codecs
import gzip
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import datasets
import pandas
import pyarrow
import pytest

from align.core.errors import UserError
from align.data import Demonstration, Prompt, Ranking, check_data, read_records
from align.data.readers import scan_rows
from align.data.sources import iter_rows
from tests.data.rows import HI, RECORDS, ROWS, assistant, error_of, lines, write_parquet
from tests.refusals import refusal

HEADER = b"prompt,chosen,rejected\n"


def gz(data):
    """A gzip file without the time of now: test processes must name their cases alike."""
    return gzip.compress(data, mtime=0)


def zst(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl", lines(ROWS)),
        ("rows.JSONL", lines(ROWS)),
        ("no-last-newline.jsonl", lines(ROWS)[:-1]),
        ("windows.jsonl", lines(ROWS).replace(b"\n", b"\r\n")),
        ("blank-lines.jsonl", b"\n" + lines(ROWS).replace(b"\n", b"\n\n")),
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
        ("rows.json", lines(ROWS)),
        ("array.json", b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=2).encode()),
        ("rows.jsonl.gz", gz(lines(ROWS))),
        ("parts.jsonl.gz", gz(lines(ROWS[:1])) + gz(lines(ROWS[1:]))),
        ("array.json.gz", gz(json.dumps(ROWS).encode())),
        ("rows.jsonl.zst", zst(lines(ROWS))),
        ("parts.jsonl.zst", zst(lines(ROWS[:1])) + zst(lines(ROWS[1:]))),
        ("array.json.zst", zst(json.dumps(ROWS).encode())),
        ("rows.csv.zst", zst(pandas.DataFrame(ROWS).to_csv(index=False).encode())),
    ],
)
def test_json_files(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert read_records(str(tmp_path / name), Prompt) == RECORDS
    assert read_records(tmp_path / name, Prompt) == RECORDS


def test_a_text_file_has_a_prompt_on_each_line(tmp_path):
    path = tmp_path / "questions.txt"
    path.write_bytes(codecs.BOM_UTF8 + b'Why?\r\n\n  {"a": 1}, "b"\n' + b"caf\xe9")
    scanned = scan_rows(iter_rows(path), Prompt)
    assert [record.prompt[0]["content"] for record in scanned.records] == ["Why?", '  {"a": 1}, "b"']
    assert scanned.problems == [f"{path}:4: not UTF-8 (byte 0xe9 at 4); save the file as UTF-8"]
    with pytest.raises(UserError, match=r"questions.txt:1: the fields prompt do not match"):
        read_records(path, Ranking)
    (tmp_path / "data.jsonl").write_bytes(lines(ROWS))
    assert read_records(tmp_path, Prompt) == RECORDS  # in a folder it may be a license


def test_a_decimal_comma_is_answered_with_a_point(tmp_path):
    path = tmp_path / "stars.csv"
    path.write_text("prompt;response;rating\nWhy?;Because.;4,5\n")
    problem = "field 'rating': is '4,5'; write 4.5, with a decimal point, in the whole column"
    assert refusal(read_records, path, Ranking) == f"{path}: row 1: {problem}"


def test_several_sources_are_read_one_after_the_other(tmp_path):
    for name, rows in (("a.jsonl", ROWS[:1]), ("b.jsonl", ROWS[1:]), ("a.jsonl, b.jsonl", ROWS[:1])):
        (tmp_path / name).write_bytes(lines(rows))
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert read_records(f"{first}, {second}", Prompt) == RECORDS
    assert read_records(f"{first}, b.jsonl", Prompt) == RECORDS[:1]  # the name of a file that exists, comma and all
    assert error_of(f"{second},{tmp_path}/c.jsonl", Prompt).startswith(f"{tmp_path}/c.jsonl: no such file or folder")


def test_parquet_files_of_prompts_and_rankings(tmp_path):
    write_parquet(tmp_path / "prompts.parquet", [{**{"id": None, "category": None}, **row} for row in ROWS])  # gaps are null
    assert read_records(tmp_path / "prompts.parquet", Prompt) == RECORDS
    row = {"prompt": [{"role": "user", "content": "Hi"}], "responses": ["a", "b"], "ranks": [2, 1]}
    write_parquet(tmp_path / "rankings.parquet", [row])
    assert read_records(tmp_path / "rankings.parquet", Ranking) == [Ranking.from_row(row)]


def test_folder_of_files_takes_those_of_the_split(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    (tmp_path / "data" / "train-00001-of-00002.jsonl").write_bytes(lines(ROWS[1:]))
    (tmp_path / "data" / "test.jsonl").write_bytes(lines([{"prompt": "held out"}]))
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("# About")
    assert read_records(tmp_path, Prompt) == RECORDS
    assert read_records(tmp_path, Prompt, split="test") == [Prompt.from_row({"prompt": "held out"})]
    assert error_of(tmp_path, split="dev") == f"{tmp_path}: no files of the split 'dev'; the folder has test, train"


def test_shards_of_a_hub_data_set_are_of_the_whole_name_alone(tmp_path):
    """A clone of ultrafeedback_binarized has the same rows in `train_prefs` and `train_sft`."""
    for split, rows in (("train_prefs", ROWS), ("train_sft", ROWS[:1]), ("test_prefs", ROWS[:1])):
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows)
    read = read_records(f"{tmp_path}[split=train_prefs]", Prompt)
    assert [record.prompt for record in read] == [record.prompt for record in RECORDS]
    told = f"{tmp_path}: no files of the split 'train'; the folder has test_prefs, train_prefs, train_sft"
    assert error_of(tmp_path) == told


def test_folder_without_split_names_is_read_whole(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:2]))
    (tmp_path / "b.jsonl.gz").write_bytes(gz(lines(ROWS[2:])))
    (tmp_path / ".hidden.jsonl").write_bytes(b"broken")
    assert read_records(tmp_path, Prompt) == RECORDS


def test_folder_saved_by_datasets(tmp_path):
    saved = datasets.Dataset.from_list([{**{"id": None, "category": None}, **row} for row in ROWS])
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "splits")
    assert read_records(tmp_path / "plain", Prompt) == RECORDS
    assert read_records(tmp_path / "splits", Prompt) == RECORDS
    assert read_records(f"{tmp_path}/splits[split=test]", Prompt) == RECORDS[:1]
    assert error_of(tmp_path / "splits", split="dev").endswith("splits: no split 'dev'; the folder has train, test")


def hub(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it is asked whether it answers


def test_hub_name_and_numbers_of_its_rows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []
    hub(monkeypatch, lambda name, split: asked.append((name, split)) or ROWS)
    assert read_records("someone/some-data", Prompt, split="test") == RECORDS
    assert asked == [("someone/some-data", "test")]
    hub(monkeypatch, lambda name, *subset, split: asked.append((name, *subset, split)) or ROWS)
    assert read_records("a/b[subset=preference, split=dev]", Prompt) == RECORDS
    assert asked[1:] == [("a/b", "preference", "dev")]
    hub(monkeypatch, lambda name, split: [*ROWS, {"prompt": ""}])
    assert error_of("a/b").startswith("a/b: row 4: field 'prompt': is empty")


def test_missing_path_is_not_looked_up_on_the_hub(monkeypatch, tmp_path):
    hub(monkeypatch, lambda name, split: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    for name in ["nothing.jsonl", "data/nothing.parquet", "./nothing", "/nothing", "a/b/c", "nothing.csv"]:
        assert error_of(name) == f"{name}: no such file or folder; check the path"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionError("no route\nmore"), "could not be reached (no route)"),
        (FileNotFoundError("is gone"), "(is gone)"),
        (ValueError(), "(ValueError)"),
    ],
)  # fmt: skip
def test_a_name_that_is_neither_file_nor_hub_data_set(monkeypatch, tmp_path, error, why):
    def load(name, split):
        raise error

    hub(monkeypatch, load)
    monkeypatch.chdir(tmp_path)
    message = error_of("a/b")
    assert message.startswith("a/b: no such file or folder, and the Hub ")
    assert why in message


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "the file is empty; write one record per line"),
        ("a.jsonl.gz", b"", "the file is empty; write one record per line"),
        ("a.jsonl", b"\n \n", "no rows"),
        ("a.jsonl.gz", gz(b""), "no rows"),
        ("a.json", b"[]", "no rows"),
        ("a.ods", b"x", "unknown file type"),
        ("a.jsonl.gz", b"plain", "corrupt gzip file (Not a gzipped file (b'pl')); copy or compress it again"),
        ("a.jsonl.gz", gz(lines(ROWS))[:-9], "corrupt gzip file (Compressed file ended before the "
         "end-of-stream marker was reached); copy or compress it again"),
        ("a.jsonl", '{"prompt": "Hi"}'.encode("utf-16"), "encoded as UTF-16"),
        ("a.csv", b"", "the file is empty; write one record per line"),
        ("a.csv", HEADER, "no rows"),
        ("a.csv", HEADER + "ä,b,c\n".encode("cp1252"), "not UTF-8 (byte 0xe4); save it as CSV UTF-8"),
        ("a.jsonl", '{"prompt": "Hi"}'.encode("utf-16-le"), "encoded as UTF-16"),
        ("a.csv", HEADER.decode().encode("utf-16-le"), "encoded as UTF-16"),
        ("a.csv", b"prompt,chosen,chosen\na,b,c\n", "duplicate column 'chosen'"),
    ],
)  # fmt: skip
def test_broken_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    fact = f"{tmp_path / name}: {message.partition(';')[0]}"
    assert error_of(tmp_path / name).startswith(fact)
    assert error_of(tmp_path / name, skip_bad_rows=True).startswith(fact)


DAMAGED = bytearray(gz(lines(ROWS * 50)))
DAMAGED[40] ^= 0xFF


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", bytes(DAMAGED), "/a.jsonl.gz: corrupt gzip file ("),
        ("a.jsonl.zst", b"plain", "/a.jsonl.zst: corrupt Zstandard file ("),
        ("a.csv.zst", zst(HEADER * 99)[:-3], "/a.csv.zst: corrupt Zstandard file ("),
        ("a.parquet", b"PAR1 or so", "/a.parquet: invalid Parquet file ("),
        (
            "a.json",
            b'\n[{"prompt": "Hi"},\n {"prompt" "Hi"}]',
            "/a.json:3: invalid JSON (Expecting ':' delimiter",
        ),
        (
            "a.json",
            b'[{"prompt": "Hi", "prompt": "Ho"}]',
            "/a.json:1: invalid JSON (duplicate key 'prompt'",
        ),
        (
            "a.csv",
            HEADER + b'a,b,c\n"a,b,c\na,b,c\n',
            "/a.csv:3: invalid CSV (unexpected end of data)",
        ),
        ("state.json", b"{}", ": not a valid `datasets` folder ("),
        ("README.md", b"# About", ": no data files in the folder; supported file types: .jsonl"),
    ],
    ids=["gzip", "zstd", "zstd end", "parquet", "array", "name twice", "csv", "datasets", "folder"],
)
def test_damaged_files_and_folders(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    source = tmp_path / name if message.startswith("/") else tmp_path
    assert error_of(source, skip_bad_rows=name.endswith("gz")).startswith(f"{tmp_path}{message}")


def test_unreadable_file():
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: only its owner may enter that
        Path(folder).chmod(0o755)
        file = Path(folder) / "a.jsonl"
        file.write_bytes(lines(ROWS))
        file.chmod(0)
        user = os.geteuid()
        if user == 0:  # root may read every file: be nobody for a moment
            os.seteuid(65534)
        try:
            said = error_of(file)
        finally:
            os.seteuid(user)
    assert said.endswith("cannot be read (Permission denied); check the file")


TEXTS = ['He said "no", twice;\nthen left.', "Tab\there", "drei ä\u2028b", "NA", "  spaces  ", "[1, 2]", "x" * 200_000]


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


def test_what_spreadsheets_and_datasets_write(tmp_path):
    path = tmp_path / "rows.csv"
    for separator in (",", ";", "\t"):
        pandas.DataFrame(ROWS).to_csv(path, sep=separator, index=False, encoding="utf-8-sig", lineterminator="\r\n")
        assert read_records(path, Prompt) == RECORDS
    datasets.Dataset.from_list([{"id": None, "category": None, **row} for row in ROWS]).to_csv(path)
    assert read_records(path, Prompt) == RECORDS


OF_CELLS = [
    ({"prompt": "Hi", "responses": '["a", "b"]', "ranks": "[2, 1]", "ratings": "[3, 6]"},
     Ranking(prompt=HI, responses=("a", "b"), ranks=(2, 1), ratings=(3, 6))),
    ({"prompt": "Hi", "chosen": "5", "rejected": "7", "margin": 1.5},
     Ranking(prompt=HI, responses=("5", "7"), ranks=(1, 2), margin=1.5)),
    ({"context": "Hi", "response1": "a", "response2": "b", "overall_preference": -2},
     Ranking(prompt=HI, responses=("a", "b"), ranks=(1, 2))),
    ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "2"}]'},
     Demonstration(prompt=HI, continuation=(assistant("2"),))),
]  # fmt: skip


@pytest.mark.parametrize(("row", "record"), OF_CELLS, ids=range(len(OF_CELLS)))
def test_columns_that_hold_no_text_are_json(row, record, tmp_path):
    pandas.DataFrame([row]).to_csv(tmp_path / "rows.csv")
    assert read_records(tmp_path / "rows.csv", type(record)) == [record]


def test_rows_are_checked_as_in_other_files(tmp_path):
    path = tmp_path / "rows.csv"
    pandas.DataFrame([{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "b", "label": False}]
                     ).to_csv(path, index=False)  # fmt: skip
    assert error_of(path, Demonstration).startswith(
        f"{path}: row 2: field 'label': is False, which marks an answer that must not"
    )
    path.write_bytes(HEADER + b"a,b,c\n\nd,e\nf,g,h\n")
    wrong = f"{path}: row 2: has 2 cells"
    assert error_of(path, Ranking).startswith(wrong)
    assert len(read_records(path, Ranking, skip_bad_rows=True)) == 2
    assert check_data(str(path)).partition("bad rows:              1 of 3 (33.3 %)\n  ")[2].startswith(wrong)
    path.write_bytes(HEADER + b"a,b,\n")
    assert error_of(path, Ranking).startswith(f"{path}: row 1: field 'rejected': is missing")
