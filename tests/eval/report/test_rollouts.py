"""Rollouts in the report: which are shown, their shades by hand, and the filters in a real browser."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from align.eval.report import write_report
from align.eval.report.data import MAX_UPDATES, load_rollouts, load_run
from align.eval.report.page import MAX_TOKENS, show_rollouts
from align.ppo import PPOConfig, run_ppo
from align.ppo.extensions.rollout_files import rollout_path, write_rollout
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft
from tests import chromium
from tests.eval.report.example_run import Page, make_runs, rollout_row


def test_shades_by_hand(tmp_path: Path) -> None:
    view = show_rollouts(load_run(make_runs(tmp_path / "run")).rollouts)
    assert view is not None
    # Tokens by size of their KL: 0 twice, 1 four times, 2 six times; advantages -1 twice, 0 four times, 1 six times.
    assert (view.kl_scale, view.advantage_scale, view.written) == (2.0, 1.0, 6)
    assert [(each.update, each.row) for each in view.rollouts] == [(u, n) for u in (1, 3) for n in range(3)]
    assert [each.tokens[0].kl for each in view.rollouts[:3]] == [0, 2, 4]
    assert [each.tokens[0].advantage for each in view.rollouts[:3]] == [-4, 0, 4]
    assert [(each.kl, each.length) for each in view.rollouts[:3]] == [(0.0, 1), (2.0, 2), (6.0, 3)]
    assert view.rollouts[1].tokens[0].figures == "log-prob −1, KL 1, advantage 0, value 1"


def test_a_long_run_shows_some_updates_and_their_extremes(tmp_path: Path) -> None:
    for update in range(1, 21):
        rows = [rollout_row(update, number % 3) for number in range(3)]
        write_rollout(rollout_path(tmp_path, update), rows)
    rollout_path(tmp_path, 20).write_bytes(b"PAR1")
    problems: list[str] = []
    updates = load_rollouts(tmp_path, problems)
    assert [rows[0].update for rows in updates] == [1, 5, 9, 12, 16]
    assert len(updates) == MAX_UPDATES - 1
    assert len(problems) == 1
    assert "update-000020.parquet: not a rollout" in problems[0]
    long = [type(row)(**{**vars(row), **{name: getattr(row, name) * 900 for name in LISTS}}) for row in updates[0]]
    view = show_rollouts([long])  # 900, 1800 and 2700 tokens
    assert view is not None
    assert len(view.rollouts) == 3
    assert view.written == 3
    view = show_rollouts([long] * 4)  # room for 2250 tokens each: the best has 2700 and comes first
    assert view is not None
    assert [each.row for each in view.rollouts] == [2] * 4
    assert sum(each.length for each in view.rollouts) > MAX_TOKENS, "at least one of each update"
    assert show_rollouts([]) is None


LISTS = ("ids", "tokens", "log_probs", "kl", "values", "advantages")


def test_filters_in_a_browser(tmp_path: Path) -> None:
    if chromium.program() is None:
        pytest.skip("chromium is not installed")
    path = write_report(make_runs(tmp_path / "run"))
    assert "What PPO learned from: 6 of the 6 responses" in Page(path.read_text(encoding="utf-8")).text.replace("\n", " ")
    with ThreadPoolExecutor(1) as pool:  # Playwright may run already in this thread, for the tests of the labeling app
        pool.submit(_try_filters, path).result()


def _try_filters(path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = chromium.launch(playwright)
        page = browser.new_page()
        page.goto(path.as_uri())
        articles, form = page.locator("#rollout-list article"), page.locator("#rollout-filters")

        def shown() -> list[str]:
            return [f"{each.get_attribute('data-update')}/{each.get_attribute('data-reward')}" for each in visible()]

        def visible() -> list:
            return [each for each in articles.all() if each.is_visible()]

        assert shown() == ["1/0.0", "1/1.0", "1/2.0", "3/0.0", "3/1.0", "3/2.0"]
        form.locator("[name=update]").select_option("3")
        form.locator("[name=reward-low]").fill("1")
        assert shown() == ["3/1.0", "3/2.0"]
        assert page.locator("#rollout-count").inner_text() == "2 of 6 responses"
        form.locator("[name=kl-high]").fill("2")
        assert shown() == ["3/1.0"]
        form.locator("[name=kl-high]").fill("")
        form.locator("[name=category]").select_option("truth")
        assert shown() == ["3/1.0"]
        for name in ("update", "category"):
            form.locator(f"[name={name}]").select_option("")
        form.locator("[name=reward-low]").fill("")
        form.locator("[name=order]").select_option("least length")
        assert shown() == ["1/0.0", "3/0.0", "1/1.0", "3/1.0", "1/2.0", "3/2.0"]

        def color() -> str:
            return str(articles.first.locator(".token").first.evaluate("it => getComputedStyle(it).backgroundColor"))

        assert color() == "rgba(0, 0, 0, 0)"  # no KL
        form.locator("[name=color]").select_option("advantage")
        assert color() == "rgba(29, 95, 168, 0.55)"  # much worse than expected
        browser.close()


COLORS = ["Red", "Blue", "Green", "Gray"]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_plot_and_line_is_there_after_a_real_pipeline(tmp_path: Path) -> None:
    shared = {"model": "tiny-gpt2", "log_to": ["none"], "dtype": "float32"}
    examples = [{"prompt": f"A color like {name}?", "completion": f"{name}."} for name in COLORS]
    demonstrations = write(tmp_path / "demonstrations.jsonl", examples)
    ranked = [
        {"prompt": row["prompt"], "responses": [row["completion"], "No!!", "Hm"], "ranks": [1, 2, 3], "category": "color"}
        for row in examples
    ]
    rankings = write(tmp_path / "rankings.jsonl", ranked)
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in examples])
    run = tmp_path / "run"
    run_sft(
        SFTConfig(train_data=demonstrations, validation_data=demonstrations, output_dir=f"{run}/sft", epochs=2, **shared)
    )
    reward = run_reward(
        RewardConfig(train_data=rankings, validation_data=rankings, demonstrations="", output_dir=f"{run}/reward", **shared)
    )
    shared |= {"updates": 2, "rollout_size": 4, "max_new_tokens": 6, "evaluate_every": 1, "missing_eos": "keep"}
    prompt_files = {"prompts": prompts, "validation_prompts": prompts}
    run_ppo(PPOConfig(reward_model=str(reward), output_dir=f"{run}/ppo", **prompt_files, **shared))
    assert load_run(run).problems == []
    html = write_report(run).read_text(encoding="utf-8")
    assert set(re.findall(r'<figure id="([\w-]+)"', html)) >= {
        *("sft-loss", "reward-loss", "reward-accuracy", "reward-distance", "reward-calibration"),
        "reward-category-accuracy",
        *("ppo-reward", "ppo-kl", "ppo-frontier", "ppo-length", "ppo-text", "ppo-entropy"),
    }
    names = re.findall(r'<th scope="row">((?:SFT|Reward model|PPO): [^<]*)</th>', html)
    assert len(names) == 11
    assert "held-out prompts" in re.findall(r'<p class="headline">([^<]*)', html)[0]
    assert html.count('<article class="pair" data-change') == len(COLORS)
