"""A command whose output is no longer read (`align ... | head`) ends without a traceback."""

import os
import socket
import subprocess
import sys

import pytest

from align.core.launch import one_line_errors


def start(words, closed=("stdout",)):
    """Start `align` with a pipe that has no reader as its standard output, and perhaps as its standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer if name in closed else subprocess.PIPE for name in ("stdout", "stderr")}
    process = subprocess.Popen([sys.executable, "-m", "align.cli", *words], text=True, **streams)
    os.close(writer)
    return process


def test_commands_end_quietly(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    sample = f"sample --model tiny-gpt2 --prompts {rows} --max_new_tokens 2 --output {tmp_path / 'out.jsonl'}"
    started = [
        (start(["data", "check", str(rows)]), 141),
        (start(["--help"]), 141),
        (start(["eval", "--help"]), 141),
        (start(["ppo", "--help"]), 141),
        (start(["data", "check", "nowhere.jsonl"], ("stdout", "stderr")), 141),
        (start(sample.split(), ("stdout", "stderr")), 1),  # rich ends the program
    ]
    for process, code in started:
        _, error = process.communicate(timeout=300)
        assert process.returncode == code, (process.args, error)
        assert "Traceback" not in (error or "")
        assert "BrokenPipe" not in (error or "")


def test_a_broken_connection_is_still_an_error():
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(BrokenPipeError), one_line_errors():
        ours.sendall(b"Hello")
