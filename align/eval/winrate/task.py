"""`align eval winrate`: which model wins, by blind comparisons of people, by a reward model, or by a judge."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from align.builtin.zoo import resolve_model
from align.core.errors import UserError
from align.core.launch import run_stage
from align.data.fields import check_texts, check_whole_numbers
from align.data.sources import iter_rows
from align.eval.core.answers import answer_settings, answered_by_all, sample_answers, score_answers
from align.eval.core.evaluated_models import open_accelerator, open_models, short_names
from align.eval.core.fingerprints import fingerprint
from align.eval.core.results import Evaluation, Figure, publish
from align.eval.core.rows import parse_rows
from align.eval.winrate.by_judge import compare_by_judge
from align.eval.winrate.fits import length_controlled_figure, strength_figures
from align.eval.winrate.pairwise import PairwiseComparison, outcome_of_rewards, pair_table, win_rate
from align.eval.winrate.settings import WinrateConfig
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.runtime.environment import console
from align.tokenization.encoded import SampledResponse


def run_winrate(config: WinrateConfig) -> list[Evaluation]:
    """Compare the models and write `winrate.json`; returns an evaluation for each model.

    Raises:
        UserError: for a mistake in the settings or the data, or a judge that fails; what was judged is kept.
    """
    accelerator = open_accelerator(config)
    if config.comparisons:
        files = [f"{Path(path).name} {fingerprint(path)}".strip() for path in config.comparisons]
        comparisons, scorer = read_comparisons(config), f"people ({', '.join(files)})"
        models = list(dict.fromkeys(name for each in comparisons for name in (each.first, each.second)))
    else:
        if len(config.models) < 2:
            raise UserError("models needs two or more models to compare")
        models = short_names(config.models)
        compare = compare_by_reward_model if config.reward_model else compare_by_judge
        comparisons, scorer = compare(config, accelerator)
    return publish(config, evaluate_models(config, comparisons, models, scorer), accelerator)


def evaluate_models(
    config: WinrateConfig, comparisons: Sequence[PairwiseComparison], models: Sequence[str], scorer: str
) -> list[Evaluation]:
    """Figures and tables of every model."""
    table = pair_table(comparisons, models)
    strength = strength_figures(comparisons, models, scorer) if len(models) > 2 else {}
    evaluations = []
    for model in models:
        figures = model_figures(comparisons, model, scorer)
        if model in strength and figures[0].n:
            figures.append(strength[model])
        evaluations.append(Evaluation("winrate", model, asdict(config), figures, {"pairs": table}))
    return evaluations


def model_figures(comparisons: Sequence[PairwiseComparison], model: str, scorer: str) -> list[Figure]:
    """The figures of one model against all others together."""
    own = [comparison for comparison in comparisons if model in (comparison.first, comparison.second)]
    count = len(own)
    if not own:
        return [Figure("win rate", None, None, None, 0, scorer, "no comparison names this model")]
    ties = sum(comparison.outcome == 0.5 for comparison in own) / count
    figures = [
        Figure("win rate", *win_rate(own, model), count, scorer, "a tie counts as half", "higher"),
        length_controlled_figure(own, model, scorer),
        Figure("ties", ties, None, None, count, scorer),
    ]
    if any(comparison.flipped for comparison in own):
        flips = sum(comparison.flipped for comparison in own) / count
        note = "verdicts that changed with the order of the answers; they count as ties"
        figures.append(Figure("position flips", flips, None, None, count, scorer, note))
    return figures


def read_comparisons(config: WinrateConfig) -> list[PairwiseComparison]:
    """Comparisons from rows with `prompt`, `responses`, `ranks` and `model`, as the app exports them; ties are kept.

    Raises:
        UserError: for a row that does not say which models it compares, or that is otherwise bad.
    """
    rows = (row for path in config.comparisons for row in iter_rows(path))
    nothing = f"{', '.join(config.comparisons)}: no comparison of two models"
    return parse_rows(rows, _comparisons_of_row, config.skip_bad_rows, nothing)


def _comparisons_of_row(row: Mapping[str, Any], _number: str) -> list[PairwiseComparison]:
    texts = check_texts(row.get("responses"), "responses", may_be_empty=True)
    ranks = check_whole_numbers(row.get("ranks"), "ranks", len(texts), 1, None)
    if row.get("model") is None:
        raise UserError("field 'model': is missing; import answers with the name of the model that wrote each")
    models = check_texts(row["model"], "model", len(texts))
    item = str(row.get("id") or row.get("prompt"))
    comparisons = []
    for i, j in combinations(range(len(texts)), 2):
        if models[i] != models[j]:
            outcome = 0.5 + 0.5 * ((ranks[i] < ranks[j]) - (ranks[i] > ranks[j]))  # rank 1 is best
            comparisons.append(PairwiseComparison(item, models[i], models[j], outcome, (len(texts[i]), len(texts[j]))))
    return comparisons


def compare_by_reward_model(config: WinrateConfig, accelerator: Accelerator) -> tuple[list[PairwiseComparison], str]:
    """Sample all models' answers and compare every pair on the prompts that all answered; returns the scorer's name too."""
    folder = str(resolve_model(config.reward_model))
    reward, reward_fingerprint = load_reward_model(folder, config.dtype, config.chat_template), fingerprint(folder)
    answers: dict[str, dict[str, list[SampledResponse]]] = {}
    rewards: dict[str, dict[str, list[float]]] = {}
    for evaluated in open_models(config, accelerator):
        name = evaluated.name
        answers[name] = sample_answers(config, "winrate", evaluated, accelerator)
        scorer = RewardModelScorer.from_loaded(reward, evaluated.loaded.tokenization, accelerator, config.batch_tokens)
        settings = answer_settings(config) | {
            "model": evaluated.source,
            "weights": evaluated.fingerprint,
            "reward_model": reward_fingerprint,
        }
        path = Path(config.output) / f"winrate-{name}-{reward_fingerprint}.jsonl"
        rewards[name] = score_answers(path, settings, scorer, answers[name], accelerator)
        if training_reward_fingerprint(evaluated.source) == reward_fingerprint:
            console.print(f"{name} was trained on this reward model: its win rate measures what it was optimized for")
    comparisons = []
    for number in answered_by_all(list(answers.values())):
        for first, second in combinations(answers, 2):
            outcome = outcome_of_rewards(rewards[first][number][0], rewards[second][number][0])
            lengths = (len(answers[first][number][0].text), len(answers[second][number][0].text))
            comparisons.append(PairwiseComparison(number, first, second, outcome, lengths))
    return comparisons, f"reward model {Path(folder).name} {reward_fingerprint}".strip()


def training_reward_fingerprint(model: str) -> str:
    """The fingerprint of the reward model that a run's policy was trained on; '' where that is not known."""
    for folder in (Path(model), Path(model).parent):
        try:
            settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        return fingerprint(settings.get("reward_model") or "") if isinstance(settings, dict) else ""
    return ""


if __name__ == "__main__":
    run_stage(WinrateConfig, run_winrate)
