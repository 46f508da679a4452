"""From clicks to a policy: judge rules in the browser, export, train a rule model, and give it to PPO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from align import cli
from annotation_ui.cli import main

from .running import Server

TINY = ["--model", "tiny-llama", "--log_to", "none", "--dtype", "float32"]


@pytest.mark.timeout(240)
def test_clicks_train_a_rule_model_that_ppo_obeys(server: Server, browser: Browser, tmp_path: Path) -> None:
    texts = ["I am 7.", "I am well.", "Room 12.", "Fine, thanks."]
    rows = [(f"t:{n}", {"prompt": "How are you?", "response": text, "id": f"r{n}"}) for n, text in enumerate(texts)]
    batch = server.add_batch(rows, "rules", rule_set="plain-style")
    page = server.page(browser, "rule-judge")
    page.goto("/?task=rules")
    for done in range(1, len(texts) + 1):
        page.wait_for_selector(".rule")
        shown = page.locator("body").inner_text()
        (text,) = [text for text in texts if text in shown]
        for rule in page.locator(".rule").all():
            broken = rule.get_attribute("data-rule") == "no-digits" and any(letter.isdigit() for letter in text)
            rule.locator(f'[data-verdict="{"violates" if broken else "follows"}"]').click()
        page.click('[data-action="submit"]')
        expect(page.locator(".count")).to_have_text(f"{done} done")
    page.context.close()

    path = tmp_path / "rules.jsonl"
    words = ["--database", server.database_url, "--data-dir", str(tmp_path)]
    assert main([*words, "export", "rule_judgments", str(path), "--batch", batch]) == 0
    judged = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(judged) == 8
    assert {row["response"] for row in judged if row["verdict"] == "violates"} == {"I am 7.", "Room 12."}

    style, output = "forms/rules/plain-style.yaml", tmp_path / "rules"
    cli.main(
        ["rules", *TINY, "--train_data", str(path), "--rules", style, "--output_dir", str(output), "--held_out_share", "0"]
    )
    ppo = ["--rule_model", str(output / "model"), "--output_dir", str(tmp_path / "ppo"), "--updates", "2"]
    cli.main(["ppo", *TINY, *ppo, "--rollout_size", "4", "--max_new_tokens", "6", "--rule_budgets", "0.1"])
    last = json.loads((tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()[-1])
    for rule in ("no-digits", "no-exclamation-marks"):
        assert 0 < last[f"reward/rule/{rule}"] < 1
        assert last[f"rule_multiplier/{rule}"] > 0
    assert (tmp_path / "ppo" / "model" / "model.safetensors").exists()
