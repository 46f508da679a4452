"""From the browser into the reward model: rank 30 items, export them on the shell, train on the file for two updates."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from align.reward import RewardConfig, run_reward
from annotation_ui.cli import main

from .running import Server, rank_rows
from .test_browser_rank import open_rank, shown_texts, submit, type_order


def random_tiers(rng: random.Random, size: int) -> list[list[int]]:
    """An order with a tie now and then, the best first."""
    order = rng.sample(range(size), size)
    tiers = [[order[0]]]
    for index in order[1:]:
        if rng.random() < 0.3:
            tiers[-1].append(index)
        else:
            tiers.append([index])
    return tiers


@pytest.mark.timeout(240)
def test_30_rankings_train_a_reward_model(server: Server, browser: Browser, tmp_path: Path) -> None:
    rows = rank_rows(30)
    rows[0][1]["responses"][1] = ""  # as policies write it
    batch = server.add_batch(rows)
    page = open_rank(server, browser, "trainer")
    rng = random.Random(30)
    for done in range(1, 31):
        type_order(page, random_tiers(rng, 4), len(shown_texts(page)))
        submit(page, done)
    page.context.close()
    path = tmp_path / "rankings.jsonl"
    assert (
        main(
            [
                "--database",
                server.database_url,
                "--data-dir",
                str(tmp_path),
                "export",
                "rankings",
                str(path),
                "--batch",
                batch,
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    left_out = json.loads(path.with_name("rankings.jsonl.manifest.json").read_text())["all_tied_left_out"]
    assert len(rows) + left_out == 30
    output = tmp_path / "reward"
    run_reward(
        RewardConfig(
            model="tiny-gpt2", train_data=str(path), output_dir=str(output), batch_size=15, log_to=["none"], dtype="float32"
        )
    )
    assert list(output.rglob("*.safetensors"))
