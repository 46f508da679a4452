"""A run folder with numbers that the tests of the report can compute with, and a parser of the page."""

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

from align.eval.report.data import StageRun
from align.eval.results import Evaluation, Measurement, save_evaluations
from align.reward.rankings import ScoredRanking
from tests.files import write_rows

HOSTILE = "</script><script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>\u202e\ud800\x00"
PROMPTS = ["What is two and two?", "Name a color.", "Who are you?", "Say hello."]
BEFORE, AFTER = [1.0, 0.0, 0.5, 0.5], [2.0, 1.0, 0.25, 1.75]
RANKINGS = [
    ScoredRanking((1, 2, 3), (2.0, 1.0, 0.0), (5, 9, 7), "truth"),
    ScoredRanking((1, 2, 3), (2.0, 0.0, 1.0), (6, 3, 8), "a < b & $c$"),
    ScoredRanking((1, 1), (0.3, 0.2), (4, 4), None),
]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows)


def make_runs(folder: Path) -> Path:
    """Three stages with numbers that the tests can compute with."""
    sft = [{"update": n, "seconds": 6.0 * n, "loss": 4.0 - n, "learning_rate": 0.1, "grad_norm": 1.0} for n in (1, 2, 3)]
    sft[0] |= {"validation/loss": 3.5, "validation/perplexity": 33.1}
    sft[2] |= {"validation/loss": 1.25, "validation/perplexity": 3.49}
    write_lines(folder / "sft/metrics.jsonl", sft)
    (folder / "sft/config.yaml").write_text(f"model: tiny-llama\noutput_dir: {folder}/sft\nprompt_loss_weight: 0.0\n")

    write_lines(
        folder / "reward/metrics.jsonl", [{"update": 1, "ranking_loss": 0.7, "accuracy": 0.5, "validation/loss": 0.6}]
    )
    (folder / "reward/config.yaml").write_text("centering_weight: 0.0\n")
    (folder / "reward/validation.json").write_text(json.dumps([asdict(ranking) for ranking in RANKINGS[:2]]))

    ppo = [{"update": n, "reward/mean": 0.5 + n, "kl/k1": 1.0 * n, "entropy": 4.0 / (n + 1)} for n in range(4)]
    for row in ppo:
        row |= {"time/sample": 0.5, "time/score": 0.2, "time/learn": 0.3, "time/update": 2.0}
    for update, reward, kl in ((0, 0.5, 0.0), (1, 1.25, 4.0), (3, 9.0, 30.0)):
        measurements = {"reward": reward, "reward_error": 0.1, "kl": kl, "length": 10.0 * (update + 1)}
        measurements |= {"eos_rate": 0.9, "repetition": 0.0}
        ppo[update] |= {f"validation/{name}": value for name, value in measurements.items()}
    ppo[1]["validation/is_best"] = 1.0
    write_lines(folder / "ppo/metrics.jsonl", ppo)
    models = f"model: {folder}/sft/model\nreward_model: {folder}/reward/model\n"
    (folder / "ppo/config.yaml").write_text(f"rollout_batch_size: 8\nmax_kl: 25.0\n{models}")
    rows = []
    for update, rewards in ((0, BEFORE), (1, AFTER), (3, AFTER)):
        for prompt, reward in zip(PROMPTS, rewards, strict=True):
            text = HOSTILE if prompt == PROMPTS[0] else f"answer {update} to {prompt}"
            turns = [{"role": "user", "content": prompt}]
            rows.append({"update": update, "prompt": turns, "response": text, "reward": reward, "ended": reward > 0.4})
    write_lines(folder / "ppo/samples.jsonl", rows)
    (folder / "ppo/environment.json").write_text(json.dumps({"python": "3.11.7", "packages": {"torch": "2.13.0"}}))
    evaluations = [Evaluation("truthfulness", name, {}, truthfulness(mc2)) for name, mc2 in (("start", 0.4), ("ppo", 0.6))]
    for name, value in (("start", 0.1), ("ppo", 0.3)):
        measurement = Measurement("mean toxicity", value, value - 0.01, value + 0.01, 20, "words 1", better="lower")
        evaluations.append(Evaluation("toxicity", name, {}, [measurement]))
    save_evaluations(folder / "eval", evaluations)
    return folder


def truthfulness(mc2: float) -> list[Measurement]:
    return [
        Measurement("mc2", mc2, mc2 - 0.05, mc2 + 0.05, 72, note="guessing gives 0.4", better="higher"),
        Measurement("mc1", 0.3, 0.2, 0.4, 72, better="higher"),
    ]


def ppo_run(points: dict[int, tuple[float, float]], **config: float) -> StageRun:
    """A PPO run with evaluations: update to (reward, KL)."""
    metrics = {update: {"validation/reward": reward, "validation/kl": kl} for update, (reward, kl) in points.items()}
    return StageRun("ppo", Path("ppo"), dict(config), {}, metrics)


class Page(HTMLParser):
    """Elements with their attributes, ids, and text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.text += data
