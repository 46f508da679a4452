"""What the tests of the stages in extras share: settings of a short run, its metrics, and commands in one line."""

import json

from align import cli

TINY = "--model tiny-llama --dtype float32 --report_to none"


def settings(folder, **more):
    """Settings of a short run in float32."""
    return {"output_dir": str(folder), "report_to": ["none"], "dtype": "float32", "learning_rate": 3e-3} | more


def command(words):
    """Run `align` with the words of a line."""
    cli.main(words.split())


def write_rows(path, rows):
    """Write rows as JSON Lines; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path):
    """The rows of a file of JSON Lines, such as metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]
