"""From clicks to models: rank or judge in the browser, export on the shell, train a reward model, a rule model, a policy."""

import json
import random

from playwright.sync_api import expect

from align import cli
from annotation_ui.cli import main
from tests.annotation_ui.pages import open_task, shown_texts, submit, type_order
from tests.annotation_ui.running import rank_rows
from tests.files import read_rows

QUIET = ["--report_to", "none", "--dtype", "float32"]
TINY = ["--model", "tiny-llama", *QUIET]


def export(server, folder, record, path, batch):
    words = ["--database", server.database_url, "--data-dir", str(folder), "export", record, str(path), "--batch", batch]
    assert main(words) == 0
    return read_rows(path)


def random_tiers(rng, size):
    """An order with a tie now and then, the best first."""
    order = rng.sample(range(size), size)
    tiers = [[order[0]]]
    for index in order[1:]:
        if rng.random() < 0.3:
            tiers[-1].append(index)
        else:
            tiers.append([index])
    return tiers


def test_30_rankings_train_a_reward_model(server, browser, tmp_path):
    rows = rank_rows(30)
    rows[0][1]["responses"][1] = ""  # as policies write it
    batch = server.add_batch(rows)
    page = open_task(server, browser, "trainer", "rank")
    rng = random.Random(30)
    for done in range(1, 31):
        type_order(page, random_tiers(rng, 4), len(shown_texts(page)))
        submit(page, done)
    path = tmp_path / "rankings.jsonl"
    rows = export(server, tmp_path, "rankings", path, batch)
    left_out = json.loads(path.with_name("rankings.jsonl.manifest.json").read_text())["all_tied_left_out"]
    assert len(rows) + left_out == 30
    output = tmp_path / "reward"
    reward = ["--model", "tiny-gpt2", "--train_data", str(path), "--output_dir", str(output), "--batch_size", "15"]
    cli.main(["reward", *reward, *QUIET])
    assert list(output.rglob("*.safetensors"))


def test_clicks_train_a_rule_model_that_ppo_obeys(server, browser, tmp_path):
    texts = ["I am 7.", "I am well.", "Room 12.", "Fine, thanks."]
    rows = [(f"t:{n}", {"prompt": "How are you?", "response": text, "id": f"r{n}"}) for n, text in enumerate(texts)]
    batch = server.add_batch(rows, "rules", rule_set="plain-style")
    page = server.page(browser, "rule-judge", "/?task=rules")
    for done in range(1, len(texts) + 1):
        page.wait_for_selector(".rule")
        shown = page.locator("body").inner_text()
        (text,) = [text for text in texts if text in shown]
        for rule in page.locator(".rule").all():
            broken = rule.get_attribute("data-rule") == "no-digits" and any(letter.isdigit() for letter in text)
            rule.locator(f'[data-verdict="{"violates" if broken else "follows"}"]').click()
        page.click('[data-action="submit"]')
        expect(page.locator(".count")).to_have_text(f"{done} done")
    path = tmp_path / "rules.jsonl"
    judged = export(server, tmp_path, "rule_judgments", path, batch)
    assert len(judged) == 8
    assert {row["response"] for row in judged if row["verdict"] == "violates"} == {"I am 7.", "Room 12."}

    style, output = "forms/rules/plain-style.yaml", tmp_path / "rules"
    cli.main(
        ["rules", *TINY, "--train_data", str(path), "--rules", style, "--output_dir", str(output), "--validation_split", "0"]
    )
    ppo = ["--rules.model", str(output / "model"), "--output_dir", str(tmp_path / "ppo"), "--total_updates", "2"]
    cli.main(["ppo", *TINY, *ppo, "--rollout_batch_size", "4", "--max_new_tokens", "6", "--rules.budgets", "0.1"])
    last = read_rows(tmp_path / "ppo" / "metrics.jsonl")[-1]
    for rule in ("no-digits", "no-exclamation-marks"):
        assert 0 < last[f"reward/rule/{rule}"] < 1
        assert last[f"rule_multiplier/{rule}"] > 0
    assert (tmp_path / "ppo" / "model" / "model.safetensors").exists()
