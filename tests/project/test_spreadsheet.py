"""The page of the way from a spreadsheet to a reward model: its sheet, and its commands with a tiny model."""

import re
import shlex

from align.cli import main
from align.data import Ranking, read_records
from tests.files import read_rows
from tests.project.markdown import page, section, table


def test_the_commands_make_a_reward_model(tmp_path, monkeypatch, capfd, caplog):
    text = page("howto/spreadsheet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.csv").write_text(re.search(r"```csv\n(.*?)```", text, re.S).group(1), encoding="utf-8")
    check, convert, train = (shlex.split(block)[1:] for block in re.findall(r"```console\n(.*?)```", text, re.S))

    main(check)
    shown = capfd.readouterr().out
    for line in (
        "kind:                  ranking",
        "tied pairs:            1 of 4 (25.0 %)",
        "columns not used:      comment (1 row)",
    ):
        assert f"{line}\n" in shown
    assert shown.endswith("bad rows:              none\n")

    main(convert)
    rankings = read_records("answers.jsonl", Ranking)
    assert rankings == read_records(convert[2], Ranking)
    assert [ranking.ranks for ranking in rankings] == [(1, 2), (2, 1), (1, 1), (1, 2)]
    assert rankings[3].responses == ("House.", "NA")

    main([*("tiny-gpt2" if word == "smollm2-135m" else word for word in train), "--report_to", "none"])
    assert "answers.jsonl: left out 1 ranking with all responses tied: ties add nothing to a loss" in caplog.messages
    folder = tmp_path / "runs" / "answers" / "reward"
    assert (folder / "model").is_dir()
    metrics = read_rows(folder / "metrics.jsonl")
    assert any("validation/accuracy" in line for line in metrics)


def test_the_other_sheets_are_read(tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_text("question,answer,stars,good,bad\nHi,a,1,c,d\nHi,b,5,e,f\n", encoding="utf-8")
    found = []
    for _, brackets in table(section(page("howto/spreadsheet"), "Other sheets"), "sheet"):
        options = re.search(r"`(\[.*?\])`", brackets).group(1)
        output = tmp_path / f"out-{len(found)}.jsonl"
        main(["data", "convert", f"{path}{options}", str(output)])
        found.append(read_rows(output)[0])
    assert found == [
        {"prompt": "Hi", "responses": ["a", "b"], "ranks": [2, 1]},
        {"prompt": "Hi", "responses": ["c", "d"], "ranks": [1, 2]},
        {"prompt": "Hi", "completion": "a"},
    ]
