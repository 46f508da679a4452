"""`align annotate` on the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from annotation_ui.cli import main
from annotation_ui.export import RECORDS
from annotation_ui.importing import read_rows


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["--data-dir", str(tmp_path), *arguments])
        streams = capsys.readouterr()
        return code, streams.out + streams.err

    (tmp_path / "s.jsonl").write_text('{"prompt": "p", "responses": ["a", "b"]}\n')
    (tmp_path / "own.yaml").write_text("name: own\nrules: [{id: a, text: b}]")
    assert run("migrate")[0] == 0
    assert len(run("create-user", "ann")[1].strip()) >= 10
    assert run("import", str(tmp_path / "s.jsonl"), "--task", "rank") == (0, "1 items in batch s\n")
    rules = (
        "import",
        str(tmp_path / "s.jsonl"),
        "--task",
        "rules",
        "--name",
        "r",
        "--rules",
        str(tmp_path / "own.yaml"),
    )
    assert run(*rules) == (0, "2 items in batch r\n")
    code, said = run("export", "rankings", str(tmp_path / "out.jsonl"), "--since", "2026-01-01")
    assert (code, said.split()[0]) == (0, "0")
    assert run("export", "rankings", str(tmp_path / "out.exe"))[0] == 2
    assert run("import", str(tmp_path / "none.jsonl"), "--task", "rank", "--name", "n") == (
        2,
        f"align annotate: {tmp_path / 'none.jsonl'}: No such file or directory\n",
    )
    assert run("--database", "mysql://x/y", "migrate")[0] == 2
    assert set(RECORDS) == {"rankings", "pairs", "rule_judgments", "demonstrations"}
    assert list(read_rows([" \n"], "f")) == []
