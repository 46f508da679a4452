import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.core.errors import UserError
from align.data import Demonstration, Prompt, Ranking, check_data, read_records, write_records
from align.data.readers import read_texts
from tests.data.rows import RECORDS, ROWS, error_of, lines, write_parquet
from tests.refusals import refusal
from tests.research_data import ABSENT

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


BAD_LINES = [
    (b'{"prompt": "Hi"', "invalid JSON (Expecting ',' delimiter, column 16); write one JSON object per line"),
    (b'{"prompt": "\xe4"}', "not UTF-8 (byte 0xe4 at 13); save the file as UTF-8"),
    (b'"Hi"', "the row is 'Hi', not a JSON object; write one {...} per line"),
    (b'{"prompt": ""}', "field 'prompt': is empty; write the text, or remove the row"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS[:1]) + b"\n" + line + b"\n" + lines(ROWS[1:]))
    assert error_of(path).startswith(f"{path}:3: {message.partition(';')[0]}")


def test_bad_rows_of_texts_folders_and_parquet_files_are_named(tmp_path):
    (tmp_path / "part.jsonl").write_bytes(b"{}\n")
    assert error_of(tmp_path).startswith(f"{tmp_path / 'part.jsonl'}:1: the fields nothing do not match")
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"prompt": "Hi"}, {"prompt": " "}])
    assert error_of(path).startswith(f"{path}: row 2: field 'prompt': is empty")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "Hi"}\n{"text"\n{"text": " "}\n')
    problem = "invalid JSON (Expecting ':' delimiter, column 8); write one JSON object per line"
    assert refusal(list, read_texts(str(tmp_path / "a.jsonl"))) == f"{tmp_path}/a.jsonl:2: {problem}"
    assert list(read_texts(str(tmp_path / "a.jsonl"), skip_bad_rows=True)) == [("Hi", None)]


def test_skipped_rows_are_counted_and_five_listed(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{broken\n" * 6 + lines(ROWS) + b'{"prompt": 1}\n')
    with caplog.at_level(logging.WARNING):
        assert read_records(path, Prompt, skip_bad_rows=True) == RECORDS
    assert caplog.messages[0] == f"{path}: skipped 7 bad rows of 10:"
    assert [message.split(" ")[0] for message in caplog.messages[1:]] == [f"{path}:{i}:" for i in range(1, 6)]


def test_only_bad_rows_and_rows_that_give_nothing_are_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": ""}\n' * 2)
    expected = f"{path}: no usable prompt; 2 of 2 rows are invalid, the first: {path}:1: field 'prompt': is empty; "
    assert error_of(path, skip_bad_rows=True).startswith(expected)
    path = tmp_path / "trees.jsonl"
    path.write_bytes(lines([{"prompt": {"text": "q", "role": "prompter", "replies": []}}]))
    assert error_of(path, Ranking) == f"{path}: no usable ranking; 1 readable row, but none of this type"


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "new/folder/out.jsonl"])
def test_what_is_written_is_read_back(tmp_path, name):
    write_records(tmp_path / name, RECORDS)
    assert read_records(tmp_path / name, Prompt) == RECORDS
    first = (tmp_path / name).read_bytes()
    assert name.endswith(".gz") or first == lines(ROWS)
    write_records(tmp_path / name, iter(RECORDS))
    assert (tmp_path / name).read_bytes() == first


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_any_text_survives_the_file(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("any") / "out.jsonl.gz"
    records = [Demonstration.from_row({"prompt": text, "completion": text}) for text in texts]
    write_records(path, records)
    assert read_records(path, Demonstration) == records


def records_that_break_off():
    yield RECORDS[0]
    raise RuntimeError("the database went away")


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, name):
    """Of a generator, or of a full disk."""
    path = tmp_path / name
    write_records(path, RECORDS)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="the database went away"):
        write_records(path, records_that_break_off())

    def fail(*_):
        raise OSError(28, "No space left on device")

    message = f"{path}: cannot be written (No space left on device); an existing file is unchanged"
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            assert refusal(write_records, path, RECORDS[:1]) == message
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


def test_a_link_goes_on_pointing_at_the_file(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    write_records(tmp_path / "link.jsonl", RECORDS)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert read_records(tmp_path / "real.jsonl", Prompt) == RECORDS


def test_only_json_lines_are_written(tmp_path):
    with pytest.raises(UserError, match=r"use the extension \.jsonl or \.jsonl\.gz"):
        write_records(tmp_path / "out.parquet", RECORDS)


@pytest.fixture(scope="module")
def real_rows():
    path = SHARED / "hh-harmless-2000.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{ABSENT}: {path}")
    return path


def test_hh_harmless(real_rows, caplog):
    assert error_of(real_rows, Ranking).startswith(f"{real_rows}:87: field 'chosen': is empty")
    with caplog.at_level(logging.WARNING):
        records = read_records(real_rows, Ranking, skip_bad_rows=True)
    assert len(records) == 1996
    assert caplog.messages[0].endswith("skipped 4 bad rows of 2000:")
    first = records[0]
    assert [turn["role"] for turn in first.prompt] == ["user", "assistant", "user", "assistant", "user"]
    assert first.prompt[0]["content"] == "what are some pranks with a pen i can do?"
    assert first.prompt[-1]["content"] == "okay some of these do not have anything to do with pens"
    assert first.responses[0].startswith("No, sorry!  All of these involve a pen")
    assert len(read_records(real_rows, Prompt)) == 2000
    assert "responses per ranking: 2: 1996\n" in check_data(str(real_rows))


def test_hh_rankings_survive_writing(real_rows, tmp_path):
    records = read_records(real_rows, Ranking, skip_bad_rows=True)
    write_records(tmp_path / "rankings.jsonl.gz", records)
    assert read_records(tmp_path / "rankings.jsonl.gz", Ranking) == records
