import json
import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from align.cli import main
from align.core.errors import UserError
from align.eval.report.data import format_number, format_percent, load_run, visible_text
from align.eval.report.page import results_as_markdown, summary_table, write_report
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from tests.eval.report.example_run import Page, make_runs, write_lines
from tests.files import write_rows
from tests.refusals import refusal
from tests.settings import run_settings


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    path = write_report(run)
    assert path == run / "report.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_shows_the_kept_policy_the_figures_and_the_commands(page: Page, run: Path) -> None:
    # Update 3 has more reward but a KL of 30, beyond max_kl 25: update 1 was kept. 1.25 - 0.5 = 0.75.
    assert "rose by 0.75, from 0.5 to 1.25 (95 % interval of the change" in page.text
    assert "at a KL of 4 nats per response from the initial policy" in page.text
    assert "The reward rose on 3 of 4 held-out prompts." in page.text
    assert "The reward fell on 1 of 4 held-out prompts" in page.text
    for text in ("truthfulness: mc2", "0.600 (0.550 to 0.650)", "words 1", "guessing gives 0.4"):
        assert text in page.text
    for stage in ("sft", "ppo"):
        assert f"align {stage} --config {run}/{stage}/config.yaml --output_dir {run}-again/{stage}" in page.text


def test_model_output_cannot_become_markup(html: str, page: Page) -> None:
    assert "alert(1)>" in page.text  # shown as text
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert not any(tag == "img" for tag, _ in page.elements)
    assert "\u202e" not in html
    assert "\x00" not in html
    policy = next(item["content"] for tag, item in page.elements if item.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_nothing_comes_from_elsewhere_and_links_lead_to_ids(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert "srcset" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
        style = attributes.get("style") or ""
        assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", style))
    ids = [item["id"] for _, item in page.elements if "id" in item]
    assert len(ids) == len(set(ids))
    assert {(item["href"] or "")[1:] for _, item in page.elements if item.get("href")} <= set(ids)


def test_plots_have_a_text_alternative_and_follow_the_theme(html: str, page: Page) -> None:
    plots = [item for tag, item in page.elements if tag == "svg"]
    assert len(plots) >= 10
    assert all(item["role"] == "img" and len(item["aria-label"] or "") > 30 for item in plots)
    body = html[html.index("<body>") :]
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)\w+", body)  # every color is one of the page's variables
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport" content="width=device-width' in html


@pytest.mark.parametrize(
    "missing", [["sft", "ppo/metrics.jsonl"], ["reward", "ppo/samples.jsonl"], ["ppo", "reward/validation.json"]]
)
def test_a_missing_part_is_said_and_the_rest_is_there(tmp_path: Path, missing: list[str]) -> None:
    folder = make_runs(tmp_path / "run")
    for number, name in enumerate(missing):
        (folder / name).rename(tmp_path / f"gone-{number}")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    problems = page.text.split("Missing data")[1]
    assert all(name in problems for name in missing)
    assert sum(tag == "svg" for tag, _ in page.elements) >= 2


def test_empty_and_broken_files(tmp_path: Path) -> None:
    for name in ("sft/config.yaml", "sft/metrics.jsonl", "reward/config.yaml", "ppo/metrics.jsonl", "ppo/samples.jsonl"):
        write_lines(tmp_path / name, [])
    (tmp_path / "reward/validation.json").write_text('[{"ranks": [1, 1], "rewards": [0, 1]}, {"ranks": [1]}, 3')
    (tmp_path / "summary.json").write_text("{}")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "There is no policy before and after PPO to compare yet" in page.text
    assert "validation.json: cannot be parsed" in page.text
    assert "summary.json: cannot be parsed" in page.text


def test_one_stage_alone_and_another_target(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    target = write_report(folder / "ppo", tmp_path / "elsewhere.html")
    assert target == tmp_path / "elsewhere.html"
    assert "rose by 0.75" in target.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_a_wrong_folder_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert str(tmp_path / name) in refusal(write_report, tmp_path / name)
    assert not list(tmp_path.rglob("report.html"))


SUMMARY = [
    {"name": "pair [bold]accuracy", "before": 0.5, "after": 0.625, "interval": "0.55 to 0.7", "note": "held out"},
    {"name": "verdict", "before": "SFT", "after": "PPO"},
]


def test_the_summary_file_is_shown(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps([*SUMMARY, {"name": "no measurements"}]))
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "pair [bold]accuracy" in page.text
    assert "+0.125" in page.text
    assert "summary.json: skipped row 3" in page.text


def test_the_table_for_the_terminal() -> None:
    text = summary_table(SUMMARY, width=100)
    row = next(line for line in text.splitlines() if "pair [bold]accuracy" in line)  # brackets are not markup
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == ["0.5", "0.625", "+0.125", "0.55 to 0.7", "held out"]
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(KeyError):
        summary_table([{"name": "x"}])


def test_markdown_and_where_there_is_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(run), "--markdown"])
    out = capsys.readouterr().out
    assert "| truthfulness: mc2 | 0.400 (0.350 to 0.450) | 0.600 (0.550 to 0.650) | 72 |  |" in out
    with pytest.raises(UserError, match="no `align eval` results"):
        results_as_markdown([tmp_path])


def test_a_killed_run_loses_only_its_last_line(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    for name in ("ppo/metrics.jsonl", "ppo/samples.jsonl"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write('{"update": 4, "rew')
    runs = load_run(folder)
    assert sorted(runs.stages["ppo"].metrics) == [0, 1, 2, 3]
    assert sum(map(len, runs.samples.values())) == 12
    # 4 lines of metrics and 12 of samples are whole; the one after them is not.
    assert [text.split(": ")[1].partition(",")[0] for text in runs.problems if "truncated" in text] == [
        "skipped row 5",
        "skipped row 13",
    ]


def test_a_line_written_again_after_a_resume_replaces_the_older(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    with open(folder / "sft/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 2, "loss": 7.0}\n{"update": 4, "loss": NaN}\n')
    series = load_run(folder).stages["sft"].series("loss")
    assert series == {1: 3.0, 2: 7.0, 3: 1.0}  # and what is not a number is no point


def test_text_and_numbers_as_people_read_them() -> None:
    assert visible_text("a\x1b[31m\r\nb\tc\ud800\u2066") == "a␛[31m\nb\tc��"
    numbers = {None: "–", "as it is": "as it is", 0.12345: "0.123", -2.0: "−2", 12345.6: "12,346", 1e-7: "1e-07"}
    assert {value: format_number(value) for value in numbers} == numbers
    assert format_number(math.nan) == "not a number"
    assert format_number(0.5, sign=True) == "+0.5"
    assert format_percent(0.623) == "62.3 %"
    assert format_percent(-0.05, sign=True) == "−5.0 points"


def test_filters_of_samples_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto(write_report(make_runs(tmp_path / "run")).as_uri())

    def shown() -> list[str]:
        pairs = page.locator("#pairs article").all()
        return [str(pair.get_attribute("data-change")) for pair in pairs if pair.is_visible()]

    assert shown() == ["1.25", "-0.25", "1.0", "1.0"]
    page.locator("#order").select_option("losses")
    assert shown() == ["-0.25", "1.0", "1.0", "1.25"]
    page.locator("#worse").check()
    assert shown() == ["-0.25"]
    assert page.locator("#count").inner_text() == "1 of 4 prompts"
    page.locator("#worse").uncheck()
    page.locator("#search").fill("say HELLO")
    assert shown() == ["1.25"]
    page.close()


COLORS = ["Red", "Blue", "Green", "Gray"]


@pytest.mark.slow
def test_every_plot_and_line_is_there_after_a_real_pipeline(tmp_path: Path) -> None:
    shared = run_settings(model="tiny-gpt2")
    examples = [{"prompt": f"A color like {name}?", "completion": f"{name}."} for name in COLORS]
    demonstrations = write_rows(tmp_path / "demonstrations.jsonl", examples)
    ranked = [
        {"prompt": row["prompt"], "responses": [row["completion"], "No!!", "Hm"], "ranks": [1, 2, 3], "category": "color"}
        for row in examples
    ]
    rankings = write_rows(tmp_path / "rankings.jsonl", ranked)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in examples])
    run = tmp_path / "run"
    sft = {"train_data": demonstrations, "validation_data": demonstrations, "num_train_epochs": 2}
    run_sft(SFTConfig(**sft, output_dir=f"{run}/sft", **shared))
    pairs = {"train_data": rankings, "validation_data": rankings, "demonstrations": ""}
    reward = run_reward(RewardConfig(**pairs, output_dir=f"{run}/reward", **shared))
    shared |= {"total_updates": 2, "rollout_batch_size": 4, "max_new_tokens": 6, "eval_steps": 1, "missing_eos_score": None}
    prompt_files = {"prompts": prompts, "validation_prompts": prompts}
    run_ppo(PPOConfig(reward_model=str(reward), output_dir=f"{run}/ppo", **prompt_files, **shared))
    assert load_run(run).problems == []
    html = write_report(run).read_text(encoding="utf-8")
    assert set(re.findall(r'<figure id="([\w-]+)"', html)) >= {
        *("sft-loss", "reward-loss", "reward-accuracy", "reward-calibration"),
        *("ppo-reward", "ppo-kl", "ppo-frontier", "ppo-length", "ppo-text", "ppo-critic", "ppo-entropy"),
    }
    names = re.findall(r'<th scope="row">((?:SFT|Reward model|PPO): [^<]*)</th>', html)
    assert len(names) == 12
    assert "held-out prompts" in re.findall(r'<p class="headline">([^<]*)', html)[0]
    assert html.count('<article class="pair" data-change') == len(COLORS)
