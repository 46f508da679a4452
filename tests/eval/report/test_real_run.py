"""The report of runs that the stages really wrote: a metric that is renamed there must not vanish from the page."""

import json
import re
from pathlib import Path

import pytest

from align.eval.report import write_report
from align.eval.report.data import load_run
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.sft import SFTConfig, run_sft

COLORS = ["Red", "Blue", "Green", "Gray"]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.slow
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
        *("sft-loss", "sft-steps", "reward-loss", "reward-accuracy", "reward-distance", "reward-calibration"),
        *("reward-category", "reward-category-accuracy", "reward-length", "reward-steps"),
        *("ppo-reward", "ppo-kl", "ppo-frontier", "ppo-length", "ppo-text", "ppo-entropy", "ppo-losses", "ppo-clips"),
        *("ppo-steps", "ppo-time"),
    }
    names = re.findall(r'<th scope="row">((?:SFT|Reward model|PPO): [^<]*)</th>', html)
    assert len(names) == 11
    assert "held-out prompts" in re.findall(r'<p class="headline">([^<]*)', html)[0]
    assert html.count('<article class="pair" data-change') == len(COLORS)
