"""The report as a whole: what is on the page, hostile text, folders that are half there."""

import json
import re
from pathlib import Path

import pytest

from align.errors import UserError
from align.eval.report import summary_table, write_report
from align.eval.report.findings import summarize_run
from align.eval.report.loading import load_run
from align.eval.report.reproduction import rerun_commands
from align.eval.report.text import visible_text
from tests.eval.report.example_run import Page, make_runs, write_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_summary_names_gain_interval_and_kl_of_the_kept_policy(page: Page) -> None:
    # Update 3 has more reward but a KL of 30, beyond max_kl 25: update 1 was kept. 1.25 - 0.5 = 0.75.
    assert "rose by 0.75, from 0.5 to 1.25 (95 % interval of the change" in page.text
    assert "at a KL of 4 nats per response from the starting model" in page.text
    assert "3 of 4 held-out prompts got a response with a higher reward." in page.text
    assert "1 of 4 held-out prompts got a response with a lower reward" in page.text


def test_the_table_has_the_numbers_of_every_stage(run: Path) -> None:
    rows = {row.name: row for row in summarize_run(load_run(run)).rows}
    sft = rows["SFT: validation loss"]
    assert (sft.before, sft.after, sft.change, sft.rating) == ("3.5", "1.25", "−2.25", "good")
    # Six pairs, one of them (ranks 2 and 3 of the second ranking) the wrong way round: 5 / 6.
    assert rows["Reward model: pairs in the right order"].after == "83.3 %"
    assert rows["PPO: response length, tokens"].change == "+10"
    reward = rows["PPO: reward on held-out prompts"]
    assert (reward.before, reward.after, reward.change) == ("0.5", "1.25", "+0.75")
    # Changes 1, 1, -0.25, 1.25: the mean of four draws lies between the least and the greatest.
    low, high = (float(word.replace("−", "-")) for word in reward.interval.split(" to "))
    assert -0.25 <= low < 0.75 < high <= 1.25


def test_what_got_worse_is_said(run: Path) -> None:
    bad = " ".join(summarize_run(load_run(run)).texts("bad"))
    assert "Response length went from 10 to 20 tokens" in bad
    assert "entropy fell from 4 to 1 nats per token" in bad


def test_model_output_cannot_become_markup(html: str, page: Page) -> None:
    assert "alert(1)>" in page.text  # shown as text
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert not any(tag == "img" for tag, _ in page.elements)
    assert "\u202e" not in html
    assert "\x00" not in html
    policy = next(item["content"] for tag, item in page.elements if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert "srcset" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
        style = attributes.get("style") or ""
        assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", style))


def test_ids_are_unique_and_inner_links_lead_somewhere(page: Page) -> None:
    ids = [item["id"] for _, item in page.elements if "id" in item]
    assert len(ids) == len(set(ids))
    assert {(item["href"] or "")[1:] for _, item in page.elements if item.get("href")} <= set(ids)


def test_plots_have_a_text_alternative_and_follow_the_theme(html: str, page: Page) -> None:
    plots = [item for tag, item in page.elements if tag == "svg"]
    assert len(plots) >= 12
    assert all(item["role"] == "img" and len(item["aria-label"] or "") > 30 for item in plots)
    body = html[html.index("<body>") :]
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)\w+", body)  # every color is one of the page's variables
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport" content="width=device-width' in html


def test_commands_start_each_stage_from_the_new_models(page: Page, run: Path) -> None:
    again = f"{run}-again"
    assert f"align sft --config {run}/sft/config.yaml --output_dir {again}/sft" in page.text
    # reward/config.yaml does not name its output_dir: the folder that it lies in counts.
    assert f"--output_dir {again}/ppo --model {again}/sft/model --reward_model {again}/reward/model\n" in page.text


def test_commands_name_the_new_run_in_every_setting(tmp_path: Path) -> None:
    run = make_runs(tmp_path / "run")
    with open(run / "ppo/config.yaml", "a", encoding="utf-8") as file:
        file.write(f"reward_models: [{run}/reward/model, elsewhere/model]\njudge_model: {run}/reward/model\n")
        file.write(f"output_dir: {run}/ppo\nreward_functions: []\nptx_data: {run}-other/x.jsonl\n")
    command = next(line for line in rerun_commands(load_run(run)) if line.startswith("align ppo"))
    again = f"{run}-again"
    assert command == (
        f"align ppo --config {run}/ppo/config.yaml --output_dir {again}/ppo --model {again}/sft/model "
        f"--reward_model {again}/reward/model --reward_models {again}/reward/model elsewhere/model "
        f"--judge_model {again}/reward/model"
    )


def test_a_run_of_dpo_is_a_section_and_its_absence_is_no_problem(run: Path, tmp_path: Path) -> None:
    assert not any("dpo" in problem for problem in load_run(run).problems)
    row = {"update": 1, "loss": 0.7, "accuracy": 0.5, "rewards/chosen": -0.1, "rewards/rejected": -0.3}
    row |= {"rewards/margin": 0.2, "logps/chosen": -50.0, "logps/rejected": -60.0, "validation/loss": 0.6}
    write_lines(tmp_path / "dpo/metrics.jsonl", [row | {"update": n} for n in (1, 2)])
    (tmp_path / "dpo/config.yaml").write_text("model: tiny-llama\nlabel_smoothing: 0.0\nloss: dpo\n")
    scored = [{"ranks": [1, 2, 3], "rewards": [0.3, 0.1, 0.2], "lengths": [5, 9, 7]}]
    (tmp_path / "dpo/validation.json").write_text(json.dumps(scored))
    found = load_run(tmp_path)
    assert list(found.stages) == list(load_run(tmp_path / "dpo").stages) == ["dpo"]
    row = next(row for row in summarize_run(found).rows if row.name == "DPO: pairs in the right order")
    assert row.after == "66.7 %"  # responses 2 and 3 are the wrong way round
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert sum(tag == "svg" for tag, _ in page.elements) == 4  # loss, accuracy, rewards, log-probabilities
    assert "Implicit rewards" in page.text


def test_a_run_of_distillation_is_a_section(run: Path, tmp_path: Path) -> None:
    assert not any("distill" in problem for problem in load_run(run).problems)
    row = {"loss": 9.0, "loss/ce": 2.0, "loss/lm": 0.5, "loss/cosine": 0.1, "kl": 0.4}
    rows = [row | {"update": n, "validation/kl": kl} for n, kl in ((1, 0.8), (2, 0.3), (3, 0.35))]
    write_lines(tmp_path / "distill/metrics.jsonl", rows)
    (tmp_path / "distill/config.yaml").write_text("model: tiny-llama\nlayer_step: 2\n")
    found = load_run(tmp_path)
    assert list(found.stages) == list(load_run(tmp_path / "distill").stages) == ["distill"]
    row = next(row for row in summarize_run(found).rows if row.name == "Distillation: KL to the teacher")
    assert (row.before, row.after, row.rating) == ("0.8", "0.3", "good")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert sum(tag == "svg" for tag, _ in page.elements) == 2  # KL, losses
    assert "KL from teacher to student" in page.text


@pytest.mark.parametrize(
    "missing", ["sft", "reward", "ppo", "ppo/samples.jsonl", "reward/validation.json", "ppo/metrics.jsonl"]
)
def test_a_missing_part_is_said_and_the_rest_is_there(tmp_path: Path, missing: str) -> None:
    folder = make_runs(tmp_path / "run")
    (folder / missing).rename(tmp_path / "gone")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "What is missing" in page.text
    assert missing in page.text.split("What is missing")[1]
    assert sum(tag == "svg" for tag, _ in page.elements) >= 2


def test_a_killed_run_loses_only_its_last_line(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    for name in ("ppo/metrics.jsonl", "ppo/samples.jsonl"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write('{"update": 4, "rew')
    runs = load_run(folder)
    assert sorted(runs.stages["ppo"].metrics) == [0, 1, 2, 3]
    assert sum(map(len, runs.samples.values())) == 12
    # 4 lines of metrics and 12 of samples are whole; the one after them is not.
    assert [text.split(": ")[1] for text in runs.problems if "cut off" in text] == [
        "row 5 is cut off or broken and left out.",
        "row 13 is cut off or broken and left out.",
    ]


def test_a_line_written_again_after_a_resume_replaces_the_older(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    with open(folder / "sft/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 2, "loss": 7.0}\n{"update": 4, "loss": NaN}\n')
    series = load_run(folder).stages["sft"].series("loss")
    assert (series.updates, series.values) == ((1, 2, 3), (3.0, 7.0, 1.0))  # and what is not a number is no point


def test_empty_and_broken_files(tmp_path: Path) -> None:
    for name in ("sft/config.yaml", "sft/metrics.jsonl", "reward/config.yaml", "ppo/metrics.jsonl", "ppo/samples.jsonl"):
        write_lines(tmp_path / name, [])
    (tmp_path / "reward/validation.json").write_text('[{"ranks": [1, 1], "rewards": [0, 1]}, {"ranks": [1]}, 3')
    (tmp_path / "summary.json").write_text("{}")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "cannot be compared yet" in page.text
    assert "validation.json: cannot be read" in page.text
    assert "summary.json: cannot be read" in page.text


def test_one_stage_alone_and_another_target(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    target = write_report(folder / "ppo", tmp_path / "elsewhere.html")
    assert target == tmp_path / "elsewhere.html"
    assert "rose by 0.75" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_a_wrong_folder_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        write_report(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("report.html"))


SUMMARY = [
    {"name": "pair [bold]accuracy", "before": 0.5, "after": 0.625, "interval": "0.55 to 0.7", "note": "held out"},
    {"name": "verdict", "before": "SFT", "after": "PPO"},
]


def test_the_summary_file_is_shown(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps([*SUMMARY, {"name": "no figures"}]))
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "pair [bold]accuracy" in page.text
    assert "+0.125" in page.text
    assert "summary.json: row 3 is cut off or broken" in page.text


def test_the_table_for_the_terminal() -> None:
    text = summary_table(SUMMARY, width=100)
    row = next(line for line in text.splitlines() if "pair [bold]accuracy" in line)  # brackets are not markup
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["0.5", "0.625", "+0.125", "0.55 to 0.7", "held out"]
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(KeyError):
        summary_table([{"name": "x"}])


def test_visible_text() -> None:
    assert visible_text("a\x1b[31m\r\nb\tc\ud800\u2066") == "a␛[31m\nb\tc��"
