"""Comparisons that people made blind in the labeling app."""

from itertools import combinations
from typing import Any

from align.data.fields import check_row, check_texts, check_whole_numbers
from align.data.sources import iter_rows
from align.errors import UserError
from align.eval.winrate.pairwise import PairwiseComparison
from align.eval.winrate.settings import WinrateConfig
from align.runtime.console import console


def read_comparisons(config: WinrateConfig) -> list[PairwiseComparison]:
    """Comparisons from rows with `prompt`, `responses`, `ranks` and `model`, as the app exports them; ties are kept.

    Raises:
        UserError: for a row that does not say which models it compares, or that is otherwise bad.
    """
    comparisons, skipped = [], 0
    for path in config.comparisons:
        for row in iter_rows(path):
            try:
                if row.error is not None:
                    raise UserError(row.error)
                comparisons += _comparisons_of_row(check_row(row.row))
            except UserError as error:
                if not config.skip_bad_rows:
                    raise UserError(f"{row.where}: {error}") from error
                skipped += 1
    if skipped:
        console.print(f"{skipped} bad rows were left out", highlight=False)
    if not comparisons:
        raise UserError(f"{', '.join(config.comparisons)}: no comparison of two models")
    return comparisons


def _comparisons_of_row(row: Any) -> list[PairwiseComparison]:
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
