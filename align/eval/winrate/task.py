"""`align eval winrate`: which model wins, by blind comparisons of people, by a reward model, or by a judge."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from align.data.fields import check_texts, check_whole_numbers
from align.data.sources import iter_rows
from align.errors import UserError
from align.eval.core.evaluated_models import open_accelerator, short_names
from align.eval.core.fingerprints import fingerprint
from align.eval.core.results import Evaluation, Figure, publish
from align.eval.core.rows import parse_rows
from align.eval.winrate.by_judge import compare_by_judge
from align.eval.winrate.by_reward_model import compare_by_reward_model
from align.eval.winrate.fits import length_controlled_figure, strength_figures
from align.eval.winrate.pairwise import PairwiseComparison, pair_table, win_rate
from align.eval.winrate.settings import WinrateConfig
from align.launch import run_stage


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


if __name__ == "__main__":
    run_stage(WinrateConfig, run_winrate)
