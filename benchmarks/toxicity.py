"""Trains the default toxicity scorer, measures scorers on held-out texts, and holds one against Perspective's scores.

    python -m benchmarks.toxicity train --data FOLDER
    python -m benchmarks.toxicity measure minilm-l6 --data FOLDER
    python -m benchmarks.toxicity reference minilm-l6 real_toxicity_samples.csv

`reference` reads the samples of GPT-3 and InstructGPT with Perspective's scores as OpenAI published them (github
openai/following-instructions-human-feedback, automatic-eval-samples); nothing may be trained on those.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from align.builtin.zoo import resolve_model
from align.eval.toxicity.head import HEAD, save_toxicity_head, sense_logits
from align.eval.toxicity.scorers import DEFAULT, ScorerConfig, open_scorer
from align.statistics import roc_auc
from benchmarks.toxicity_data import Source, sources
from benchmarks.toxicity_training import train


def train_head(folder: Path, cache: Path) -> None:
    """Train the head, write it, and print what it makes of the held-out fifth of each source."""
    head, found, states, words = train(folder, str(resolve_model(DEFAULT)), cache)
    count = sum((~source.held_out).sum() for source in found)
    note = f"{count} texts of {len(found)} sources: python -m benchmarks.toxicity train"
    save_toxicity_head(head, note)
    logits = sense_logits(states, head).numpy() + words @ head["words"].numpy()
    scores = np.split(1 / (1 + np.exp(-logits)), np.cumsum([len(source.texts) for source in found])[:-1])
    print(f"{HEAD}: {note}\n")
    print_sources(found, [part[source.held_out] for source, part in zip(found, scores, strict=True)])


def measure(scorer_name: str, folder: Path) -> None:
    """Print what a scorer makes of the fifth of each source that the default never learned from."""
    scorer, found = open_scorer(ScorerConfig(scorer=scorer_name)), sources(folder)
    texts = [text for source in found for text in np.array(source.texts, dtype=object)[source.held_out]]
    counts = [int(source.held_out.sum()) for source in found]
    print(f"{scorer.title} on {len(texts)} held-out texts\n")
    print_sources(found, np.split(np.array(scorer(texts)), np.cumsum(counts)[:-1]))


def print_sources(sources: Sequence[Source], held_out: Sequence[np.ndarray]) -> None:
    """Print a row of figures for each source.

    Args:
        held_out: the scores of its held-out texts.
    """
    heads = ["source", "learned", "held out", "AUC at 0.5", "Spearman", "0.5 or more"]
    print(f"| {' | '.join(heads)} |\n| {' | '.join('---' for _ in heads)} |")
    for source, found in zip(sources, held_out, strict=True):
        held, targets = source.held_out, np.array(source.targets)[source.held_out]
        toxic = targets >= 0.5
        auc = f"{roc_auc(found, toxic):.3f}" if 0 < toxic.sum() < len(toxic) else "-"
        rank = f"{spearmanr(found, targets).statistic:.3f}" if source.labeled else "-"
        cells = [source.name, (~held).sum(), held.sum(), auc, rank, f"{(found >= 0.5).mean():.3f}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def reference_figures(rows: Sequence[dict[str, str]], scores: Sequence[float]) -> dict[str, float]:
    """How far scores agree with the reference's in `rows` of model_type, prompt_type and toxicity.

    Returns:
        Spearman's correlation over texts, AUC where the reference says 0.5 or more, Spearman's correlation of the means
        of cells (model x instruction), and the mean score for each instruction.
    """
    given, expected = np.asarray(scores), np.array([float(row["toxicity"]) for row in rows])
    names = [(row["model_type"], row["prompt_type"]) for row in rows]
    cells = {cell: np.array([name == cell for name in names]) for cell in dict.fromkeys(names)}
    means = [[values[of].mean() for of in cells.values()] for values in (given, expected)]
    kinds = {kind: np.array([name[1] == kind for name in names]) for _, kind in cells}
    figures = {
        "Spearman": float(spearmanr(given, expected).statistic),
        "AUC": roc_auc(given, expected >= 0.5),
        "Spearman of cell means": float(spearmanr(*means).statistic),
    }
    return figures | {f"mean, {kind}": float(given[of].mean()) for kind, of in kinds.items()}


def compare_with_reference(name: str, path: Path) -> None:
    """Print the figures of a scorer against a file of scored samples."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    scorer = open_scorer(ScorerConfig(scorer=name))
    scores = [
        score if row["sample"].strip() else 0.0
        for row, score in zip(rows, scorer([row["sample"] or " " for row in rows]), strict=True)
    ]
    print(f"{scorer.title} on {len(rows)} texts of {path.name}")
    for figure, value in reference_figures(rows, scores).items():
        print(f"  {figure}: {value:.3f}")


def main() -> None:
    """`train`, `measure SCORER` or `reference SCORER FILE`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.toxicity", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    training = actions.add_parser("train", help="fit the default scorer's head and write it")
    training.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of the tweets and the moderation set"
    )
    training.add_argument("--cache", type=Path, default=Path("runs/toxicity-states.npz"), help="the encoder's states")
    measuring = actions.add_parser("measure", help="a scorer on the texts that the default's training left out")
    measuring.add_argument("scorer")
    measuring.add_argument("--data", type=Path, default=Path("../shared/data"), help="as for train")
    reference = actions.add_parser("reference", help="hold a scorer against Perspective's scores of real samples")
    reference.add_argument("scorer")
    reference.add_argument("file", type=Path, help="real_toxicity_samples.csv")
    given = parser.parse_args()
    if given.action == "train":
        train_head(given.data, given.cache)
    elif given.action == "measure":
        measure(given.scorer, given.data)
    else:
        compare_with_reference(given.scorer, given.file)


if __name__ == "__main__":
    main()
