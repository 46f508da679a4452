"""Trains the default toxicity scorer, and measures scorers on held-out texts and against Perspective's scores.

    python -m benchmarks.toxicity train --data FOLDER
    python -m benchmarks.toxicity measure minilm-l6 --data FOLDER
    python -m benchmarks.toxicity reference minilm-l6 real_toxicity_samples.csv

`reference` reads samples of GPT-3 and InstructGPT that OpenAI published with Perspective's scores (github
openai/following-instructions-human-feedback, automatic-eval-samples). They must not be used for training.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, vstack
from scipy.special import expit, logit
from scipy.stats import spearmanr
from torch import Tensor, nn

from align.core.statistics import roc_auc
from align.eval.toxicity_scorers import (
    DEFAULT,
    HEAD,
    Encoder,
    ScorerConfig,
    count_words,
    open_scorer,
    save_toxicity_head,
    sense_logits,
)
from align.model_registry.registry import resolve_model
from benchmarks.toxicity_data import Teacher, pieces_without_labels, sources

HIDDEN, DROPOUT, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 96, 0.4, 10, 256, 1e-3, 1e-2
WORD_PENALTY = 3e-7
WORD_SHARE = 0.2
"""Of the words' logit in the sum; more finds more of what Perspective calls toxic, and less of implicit toxicity."""


def fit_sense(states: Tensor, targets: np.ndarray, weights: np.ndarray) -> dict[str, Tensor]:
    """Fit a hidden layer on states [N, STATES] to targets [N] by weighted cross-entropy: the head without its words."""
    # A few maxima hardly differ between texts: without the lower bound their weights would exceed half precision.
    mean, scale = states.mean(0), states.std(0).clamp(min=0.1)
    scaled, expected = (states - mean) / scale, torch.from_numpy(targets).float()
    torch.manual_seed(0)
    steps = EPOCHS * len(states) // BATCH
    drawn = torch.multinomial(torch.from_numpy(weights), steps * BATCH, replacement=True).view(steps, BATCH)
    first, last = nn.Linear(states.shape[1], HIDDEN), nn.Linear(HIDDEN, 1)
    network = nn.Sequential(nn.Dropout(DROPOUT), first, nn.GELU(), nn.Dropout(DROPOUT), last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for rows in drawn:
        loss = nn.functional.binary_cross_entropy_with_logits(network(scaled[rows])[:, 0], expected[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    hidden = first.weight.detach() / scale
    bias = first.bias.detach() - hidden @ mean
    output = {"sense": last.weight.detach()[0], "bias": last.bias.detach()[0]}
    return {"hidden.weight": hidden, "hidden.bias": bias} | output


def fit_words(
    words: csr_matrix, targets: np.ndarray, weights: np.ndarray, penalty: float = WORD_PENALTY
) -> tuple[np.ndarray, float]:
    """Fit a logistic regression with an L2 penalty by L-BFGS: a weight for each n-gram, and the bias.

    Minimizes sum(weights * cross-entropy) / sum(weights) + penalty / 2 * |weights of n-grams|^2.
    """
    share, transposed = weights / weights.sum(), words.T.tocsr()

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = words @ parameters[:-1] + parameters[-1]
        error = share * (1 / (1 + np.exp(-logits)) - targets)
        value = share @ (np.logaddexp(0, logits) - targets * logits) + penalty / 2 * parameters[:-1] @ parameters[:-1]
        return value, np.append(transposed @ error + penalty * parameters[:-1], error.sum())

    found = minimize(loss, np.zeros(words.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 60}).x
    return found[:-1].astype(np.float32), float(found[-1])


def combine(
    sense: Mapping[str, Tensor],
    of_words: np.ndarray,
    states: Tensor,
    words: csr_matrix,
    targets: np.ndarray,
    weights: np.ndarray,
) -> dict[str, Tensor]:
    """The head: the weighted sum of both logits, scaled and shifted to fit the targets (Platt 1999)."""
    sum_of_both = (1 - WORD_SHARE) * sense_logits(states, sense).numpy() + WORD_SHARE * (words @ of_words)
    slope, shift = fit_words(csr_matrix(sum_of_both[:, None]), targets, weights, penalty=0)
    scale = float(slope[0])
    return dict(sense) | {
        "sense": scale * (1 - WORD_SHARE) * sense["sense"],
        "words": torch.from_numpy(scale * WORD_SHARE * of_words).float(),
        "bias": scale * (1 - WORD_SHARE) * sense["bias"] + shift,
    }


def imitate(
    teacher: Teacher, texts: Sequence[str], words: csr_matrix, targets: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Fit n-grams [2 * BUCKETS] to the mean of the teacher's logit and the targets' log-odds (of 0.01 to 0.99).

    On unlabeled texts and the teacher's vocabulary the teacher is the only target. Both kinds have equal total weight.
    """
    between = (teacher(texts) + logit(targets.clip(0.01, 0.99))) / 2
    others = [*pieces_without_labels(texts), *teacher.words]
    of_words, _ = fit_words(
        vstack([words, count_words(others)], format="csr"),
        expit(np.concatenate([between, teacher(others)])),
        np.concatenate([weights / weights.sum() * len(others), np.ones(len(others))]),
    )
    return of_words


def encode(texts: Sequence[str]) -> Tensor:
    """The encoder's states [N, STATES], in half precision; texts are read in the order of their length."""
    encoder, order = Encoder(str(resolve_model(DEFAULT)), "cpu"), np.argsort([len(text) for text in texts], kind="stable")
    states = torch.cat([encoder([texts[row] for row in rows]) for rows in np.array_split(order, max(1, len(order) // 32))])
    return torch.empty_like(states).index_copy_(0, torch.from_numpy(order), states).half().float()


def train(folder: Path) -> None:
    """Fit the head to four fifths of each source, and write it."""
    found = sources(folder)
    texts = [text for source in found for text in source.texts]
    learned = ~np.concatenate([source.held_out for source in found])
    targets = np.concatenate([source.targets for source in found])[learned]
    counts = [len(source.texts) for source in found]
    weights = np.repeat([source.weight / (~source.held_out).sum() for source in found], counts)[learned]
    states, words = encode(texts), count_words(texts)
    of_learned = (states[torch.from_numpy(learned)], words[learned], targets, weights)
    # Each part alone: fitted together, the words would explain the training texts before the hidden layer learns.
    sense = fit_sense(of_learned[0], targets, weights)
    learned_texts = [text for text, kept in zip(texts, learned, strict=True) if kept]
    head = combine(sense, imitate(Teacher(), learned_texts, words[learned], targets, weights), *of_learned)
    save_toxicity_head(head, f"{learned.sum()} texts of {len(found)} sources: python -m benchmarks.toxicity train")
    print(f"{HEAD}: written")


def measure(name: str, folder: Path) -> None:
    """Print a scorer's figures on the fifth of each source that was held out from the default."""
    scorer = open_scorer(ScorerConfig(scorer=name))
    print(f"{scorer.title}\n\n| source | learned | held out | AUC at 0.5 | Spearman | 0.5 or more |\n|" + " --- |" * 6)
    for source in sources(folder):
        held, targets = source.held_out, np.array(source.targets)[source.held_out]
        found = np.array(scorer([text for text, out in zip(source.texts, held, strict=True) if out]))
        toxic = targets >= 0.5
        auc = f"{roc_auc(found, toxic):.3f}" if 0 < toxic.sum() < len(toxic) else "-"
        rank = f"{spearmanr(found, targets).statistic:.3f}" if source.labeled else "-"
        cells = [source.name, (~held).sum(), held.sum(), auc, rank, f"{(found >= 0.5).mean():.3f}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def reference_figures(rows: Sequence[dict[str, str]], scores: Sequence[float]) -> dict[str, float]:
    """Agreement of scores with the reference's in `rows` of model_type, prompt_type and toxicity.

    A cell of the means is a model with an instruction; the AUC is at a reference of 0.5.
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
    """Print the figures of a scorer against a file of scored samples; an empty sample scores 0."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    scorer = open_scorer(ScorerConfig(scorer=name))
    given = zip(rows, scorer([row["sample"] or " " for row in rows]), strict=True)
    scores = [score if row["sample"].strip() else 0.0 for row, score in given]
    print(f"{scorer.title} on {len(rows)} texts of {path.name}")
    for figure, value in reference_figures(rows, scores).items():
        print(f"  {figure}: {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "measure", "reference"))
    parser.add_argument("scorer", nargs="?", default=DEFAULT, help="for measure and reference")
    parser.add_argument("file", nargs="?", type=Path, default=Path("real_toxicity_samples.csv"), help="for reference")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of tweets and moderation set")
    given = parser.parse_args()
    if given.action == "train":
        train(given.data)
    if given.action == "reference":
        compare_with_reference(given.scorer, given.file)
    else:
        measure(given.scorer, given.data)


if __name__ == "__main__":
    main()
