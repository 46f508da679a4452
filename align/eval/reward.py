"""`align eval reward`: a reward model on preferences, best-of-n curves, and reward against KL over PPO's policies.

A second reward model, called gold, shows over-optimisation: what the first one praises and the second does not.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from accelerate import Accelerator

from align.batching import over_rows
from align.cli import run_stage
from align.config import ModelConfig, option, require
from align.distributed import compute_dtype, place_frozen
from align.encoding import Limits
from align.errors import UserError
from align.eval.answers import draw_answers, drawing, score_answers
from align.eval.best_of import expected_best, kl_bound, powers_of_two
from align.eval.compare import response_kl
from align.eval.intervals import mean_interval, percentiles, resample
from align.eval.results import Evaluation, Figure, Json, Rows, publish, short
from align.eval.settings import AnswerConfig
from align.eval.subjects import Subject, fingerprint, open_accelerator, short_names, subjects
from align.models.loading import Loaded, load
from align.models.zoo import resolve_model
from align.reward.checkpoint import LoadedReward, load_reward_model
from align.reward.loss import pairs_of
from align.reward.metrics import Scored, calibration, calibration_error, correlation, kendall_tau, summarize
from align.reward.scoring import Answer, RewardModelScorer
from align.reward.trainer import Item, encode_rankings, rewards_of


@dataclass(kw_only=True)
class RewardEvalConfig(AnswerConfig):
    """A reward model on preferences; with `models` best-of-n curves; with `frontier` reward against KL."""

    reward_model: str = option("", "reward model to evaluate, which also chooses among answers: a folder or a run")
    gold_model: str = option("", "a second reward model, evaluated beside it, that chooses nothing; empty: none")
    preferences: str = option("data/rankings_heldout.jsonl", "rankings or pairs that neither was trained on; empty: none")
    max_response_tokens: int = option(1024, "longest response among the preferences, in tokens")
    samples: int = option(64, "answers of each of models to each prompt; best-of-n curves go up to this n")
    frontier: str = option("", "folder of a PPO run with keep_policies: reward against KL over its policies; empty: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "reward_model", bool(self.reward_model), "given")
        require(self, "samples", self.samples > 1, "above 1")
        require(self, "max_response_tokens", self.max_response_tokens > 0, "above 0")
        require(self, "gold_model", self.gold_model != self.reward_model, "another model than reward_model")
        given = bool(self.preferences or self.models or self.frontier)
        require(self, "preferences", given, "given, unless models or frontier are")


@dataclass(frozen=True)
class Judge:
    """A reward model with its short name, its fingerprint and what it is: the proxy that chooses, or gold."""

    name: str
    mark: str
    found: LoadedReward

    @property
    def label(self) -> str:
        """The scorer's name in results."""
        return f"reward model {self.name} {self.mark}"


def run_reward_eval(config: RewardEvalConfig) -> list[Evaluation]:
    """Evaluate and write `reward.json`, and `best-of-n.json` and `frontier.json` where they are asked for.

    Raises:
        UserError: for anything that the settings, the data or a model have wrong; what was computed is kept.
    """
    accelerator = open_accelerator(config)
    judges = open_judges(config)
    found: list[list[Evaluation]] = []
    if config.preferences:
        found.append([on_preferences(config, judge, accelerator) for judge in judges])
    if config.models:
        found.append([best_of_n(config, subject, judges, accelerator) for subject in subjects(config, accelerator)])
    if config.frontier:
        found.append(frontier(config, judges, accelerator))
    return publish(config, [each for evaluations in found for each in evaluations], accelerator)


def open_judges(config: RewardEvalConfig) -> list[Judge]:
    """The reward model and, where there is one, the gold model."""
    given = [config.reward_model, *([config.gold_model] if config.gold_model else [])]
    folders = [str(resolve_model(folder)) for folder in given]
    return [
        Judge(name, fingerprint(folder), load_reward_model(folder, config.dtype))
        for name, folder in zip(short_names(given), folders, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------- preferences

HIGH = "an absolute value: resamples, with fewer different pairs, come out higher, and so does the interval"


def on_preferences(config: RewardEvalConfig, judge: Judge, accelerator: Accelerator) -> Evaluation:
    """Accuracy, calibration and order of a reward model on rankings, over all and by category."""
    scored = score_rankings(config, judge, accelerator)
    total = summarize(scored, config.resamples)
    taus = [kendall_tau(item.ranks, item.rewards) for item in scored]
    pairs, low, high = int(total["pairs"]), total["accuracy/low"], total["accuracy/high"]
    rewards = torch.tensor([reward for item in scored for reward in item.rewards], dtype=torch.float64)
    sure = intervals(scored, config.resamples)
    figures = [
        Figure("accuracy", total["accuracy"], low, high, pairs, judge.label, "share of pairs in the labelers' order"),
        Figure("Kendall's tau", float(np.mean(taus)), *mean_interval(taus, config.resamples), len(taus), judge.label),
        Figure("calibration error", total["calibration_error"], *sure["calibration"], pairs, judge.label, HIGH),
        Figure("length correlation", total["length_correlation"], *sure["length"], len(rewards), judge.label),
    ]
    made = pairs_of([list(item.ranks) for item in scored], [0.0] * len(scored))
    stated = [
        {"stated": round(said, 4), "right": round(right, 4), "pairs": count}
        for said, right, count in calibration(rewards[made.better] - rewards[made.worse])
    ]
    tables = {"by category": by_category(scored, config.resamples), "calibration": stated}
    return Evaluation("reward", judge.name, asdict(config) | {"reward_sha256": judge.mark}, figures, tables)


def intervals(scored: Sequence[Scored], resamples: int) -> dict[str, tuple[float, float]]:
    """Intervals of `calibration` error and `length` correlation: whole rankings are drawn again."""
    rewards, lengths = (
        [torch.tensor(getattr(item, name), dtype=torch.float64) for item in scored] for name in ("rewards", "lengths")
    )
    made = [pairs_of([list(item.ranks)], [0.0]) for item in scored]
    differences = [each[pairs.better] - each[pairs.worse] for each, pairs in zip(rewards, made, strict=True)]

    def of(row: np.ndarray) -> tuple[float, float]:
        drawn = (torch.cat([parts[item] for item in row]) for parts in (differences, rewards, lengths))
        difference, reward, length = drawn
        return calibration_error(difference), correlation(reward, length)

    low, high = percentiles(resample(lambda rows: np.array([of(row) for row in rows]), len(scored), resamples))
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(("calibration", "length"))}


def by_category(scored: Sequence[Scored], resamples: int) -> list[Json]:
    """A row for each category among the rankings."""
    rows = []
    for category in sorted({item.category or "none" for item in scored}):
        total = summarize([item for item in scored if (item.category or "none") == category], resamples)
        names = {"accuracy": "accuracy", "low": "accuracy/low", "high": "accuracy/high", "Kendall's tau": "kendall_tau"}
        names["calibration error"] = "calibration_error"
        figures = {name: round(total[key], 4) for name, key in names.items()}
        rows.append({"category": category, "pairs": int(total["pairs"]), **figures})
    return rows


def score_rankings(config: RewardEvalConfig, judge: Judge, accelerator: Accelerator) -> list[Scored]:
    """Rewards of every response of the preferences; kept in `OUTPUT/reward-<name>.jsonl`."""
    loaded = judge.found.loaded
    limits = Limits(config.max_prompt_tokens, config.max_response_tokens, config.overlong)
    items = encode_rankings(loaded, config.preferences, limits, config.skip_bad_rows)
    module = place_frozen(judge.found.model, accelerator)

    @torch.no_grad()
    def work(chunk: list[Item]) -> list[Json]:
        def score(rows: list[int]) -> list[list[float]]:
            part = [chunk[row] for row in rows]
            flat = iter((rewards_of(module, part, accelerator.device) - judge.found.mean).tolist())
            return [[next(flat) for _ in item.responses] for item in part]

        costs = [loaded.backbone.row_tokens(len(item.prompt), [len(r) for r in item.responses]) for item in chunk]
        return [{"rewards": rewards} for rewards in over_rows(costs, config.batch_tokens, accelerator, score)]

    names = ("dtype", "preferences", "max_prompt_tokens", "max_response_tokens", "overlong")
    settings = {name: getattr(config, name) for name in names} | {"reward_sha256": judge.mark}
    settings["preferences_sha256"] = fingerprint(config.preferences)
    path = Path(config.output) / f"reward-{judge.name}.jsonl"
    rows = Rows(path, settings, accelerator).fill({str(n): item for n, item in enumerate(items, 1)}, work)
    return [
        Scored(tuple(item.ranks), tuple(row["rewards"]), tuple(map(len, item.responses)), item.category)
        for item, row in zip(items, rows, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ best of n


def judged_answers(
    config: RewardEvalConfig, task: str, subject: Subject, judges: Sequence[Judge], accelerator: Accelerator, copies: int
) -> tuple[dict[str, list[Answer]], list[np.ndarray]]:
    """A model's answers, and the rewards [prompts, copies] that each reward model gives them."""
    answers = draw_answers(config, task, subject, accelerator, copies)
    rewards = []
    for judge in judges:
        scorer = RewardModelScorer.of(judge.found, subject.loaded.tokenization, accelerator, config.batch_tokens)
        settings = drawing(config) | {"weights": subject.fingerprint, "copies": copies, "reward_sha256": judge.mark}
        path = Path(config.output) / f"{task}-{subject.name}-by-{judge.name}.jsonl"
        rewards.append(np.array(list(score_answers(path, settings, scorer, answers, accelerator).values())))
    return answers, rewards


def best_of_n(config: RewardEvalConfig, subject: Subject, judges: Sequence[Judge], accelerator: Accelerator) -> Evaluation:
    """The curve of a model: the expected reward of its best of n answers, and what gold says of those."""
    _, rewards = judged_answers(config, "best-of-n", subject, judges, accelerator, config.samples)
    curve, figures = [], []
    for n in powers_of_two(config.samples):
        row: Json = {"n": n, "KL bound": round(kl_bound(n), 4)}
        for judge, values in zip(judges, rewards, strict=True):
            best = [expected_best(rewards[0][i], values[i], n) for i in range(len(values))]
            mean, (low, high) = float(np.mean(best)), mean_interval(best, config.resamples)
            kind = "reward" if judge is judges[0] else "gold"
            row |= {kind: round(mean, 4), f"{kind} low": round(low, 4), f"{kind} high": round(high, 4)}
            note = f"KL to the model's own answers at most {kl_bound(n):.2f} nats" if n > 1 else ""
            figures.append(Figure(f"{kind}, best of {n}", mean, low, high, len(best), judge.label, note))
        curve.append(row)
    figures.sort(key=lambda figure: figure.name.startswith("gold"))  # the proxy's curve first, gold's behind it
    settings = asdict(config) | {"weights": subject.fingerprint}
    return Evaluation("best-of-n", subject.name, settings, figures, {"curve": curve})


# ------------------------------------------------------------------------------------------------------------- frontier


def frontier(config: RewardEvalConfig, judges: Sequence[Judge], accelerator: Accelerator) -> list[Evaluation]:
    """Reward, gold reward and KL to the start of every policy that a PPO run kept, and of the start itself."""
    policies, start = policies_of(config.frontier)
    reference = load(
        ModelConfig(model=start, chat_template=config.chat_template, dtype=config.dtype), compute_dtype(config.dtype)
    )
    reference.backbone.to(accelerator.device).eval().requires_grad_(False)
    found = []
    for subject in subjects(replace(config, models=[start, *policies]), accelerator):
        answers, rewards = judged_answers(config, "frontier", subject, judges, accelerator, 1)
        kl = _kl(config, subject, reference, answers, accelerator)
        figures = [Figure("KL", float(np.mean(kl)), *mean_interval(kl, config.resamples), len(kl), note="nats a response")]
        for judge, values in zip(judges, rewards, strict=True):
            kind = "reward" if judge is judges[0] else "gold"
            interval = mean_interval(values[:, 0], config.resamples)
            figures.append(Figure(kind, float(values.mean()), *interval, len(values), judge.label))
        found.append(Evaluation("frontier", subject.name, asdict(config) | {"weights": subject.fingerprint}, figures))
    curve = [{"policy": each.model} | {figure.name: short(figure.value or 0.0) for figure in each.figures} for each in found]
    return [replace(each, tables={"reward against KL": curve}) for each in found]


def policies_of(run: str) -> tuple[list[str], str]:
    """The folders of the policies that a PPO run kept, in the order of updates, and the model that it started from.

    Raises:
        UserError: if the folder is not such a run.
    """
    folder = Path(run)
    policies = sorted(str(path) for path in folder.glob("policies/update-*"))
    if not policies:
        raise UserError(f"frontier {run}: no policies/ in it; train with keep_policies")
    try:
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return policies, str(settings["model"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'config.yaml'}: not the settings of a PPO run") from error


def _kl(
    config: RewardEvalConfig,
    subject: Subject,
    reference: Loaded,
    answers: dict[str, list[Answer]],
    accelerator: Accelerator,
) -> list[float]:
    flat = [row[0] for row in answers.values()]
    contexts, ids = [answer.prompt_ids for answer in flat], [answer.ids for answer in flat]
    return response_kl(subject.loaded, reference, contexts, ids, config.temperature or 1.0, accelerator)


if __name__ == "__main__":
    run_stage(RewardEvalConfig, run_reward_eval)
