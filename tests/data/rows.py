"""What the tests of data share: turns, three prompts as rows and as records, files of rows, and the error of a source."""

import json

import pytest

from align.core.errors import UserError
from align.data import Prompt, read_records


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


ROWS = [{"prompt": "one"}, {"prompt": "two", "id": "2"}, {"prompt": "drei ä\u2028b", "category": "c"}]
RECORDS = [Prompt.from_row(row) for row in ROWS]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def error_of(source, kind=Prompt, **options):
    """The message of the refusal to read a source: one line."""
    with pytest.raises(UserError) as caught:
        read_records(str(source), kind, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
