"""A command whose output is no longer read (`align ... | head`) ends without a traceback."""

import os
import socket
import subprocess
import sys

import pytest

from align.core.launch import one_line_errors


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        ("data check FOLDER/rows.jsonl", "stdout", 141),
        ("--help", "stdout", 141),
        ("data check nowhere.jsonl", "stdout stderr", 141),
        pytest.param("ppo --help", "stdout", 141, marks=pytest.mark.slow),
        pytest.param(
            "sample --model tiny-gpt2 --prompts FOLDER/rows.jsonl --max_new_tokens 2 --output FOLDER/out.jsonl",
            "stdout stderr",
            1,  # rich ends the program
            marks=pytest.mark.slow,
        ),
    ],
)
def test_commands_end_quietly(words, closed, code, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    reader, writer = os.pipe()  # without a reader
    os.close(reader)
    streams = {name: writer if name in closed else subprocess.PIPE for name in ("stdout", "stderr")}
    program = [sys.executable, "-m", "align.cli", *words.replace("FOLDER", str(tmp_path)).split()]
    process = subprocess.Popen(program, text=True, **streams)
    os.close(writer)
    _, error = process.communicate(timeout=300)
    assert process.returncode == code, error
    assert "Traceback" not in (error or "")
    assert "BrokenPipe" not in (error or "")


def test_a_broken_connection_is_still_an_error():
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(BrokenPipeError), one_line_errors():
        ours.sendall(b"Hello")
