"""How the default toxicity scorer is trained: `python -m benchmarks.toxicity train`."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, vstack
from scipy.special import expit, logit
from torch import Tensor

from align.eval.toxicity.head import Encoder, count_words, sense_logits
from benchmarks.toxicity_data import Source, pieces_without_labels, sources
from benchmarks.toxicity_teacher import Teacher

HIDDEN, DROPOUT, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 96, 0.4, 10, 256, 1e-3, 1e-2
WORD_PENALTY = 3e-7
WORD_SHARE = 0.2
"""Of the words' logit in the sum, the rest is the sense's. More finds more of what Perspective calls toxic, and less of
what only the sense shows."""


def fit_sense(states: Tensor, targets: np.ndarray, weights: np.ndarray) -> dict[str, Tensor]:
    """A hidden layer on the encoder's states, by cross-entropy with soft targets: the head but for its words.

    Args:
        states: [N, STATES].
        targets: [N] from 0 to 1.
        weights: [N] of each text in the loss.
    """
    # A few maxima are the same for nearly all texts: divided by what they vary, their weights would leave half precision.
    mean, scale = states.mean(0), states.std(0).clamp(min=0.1)
    network = _fit_network((states - mean) / scale, targets, weights)
    first, last = network[1], network[4]
    hidden = first.weight.detach() / scale
    return {
        "hidden.weight": hidden,
        "hidden.bias": first.bias.detach() - hidden @ mean,
        "sense": last.weight.detach()[0],
        "bias": last.bias.detach()[0],
    }


def combine(
    sense: Mapping[str, Tensor],
    of_words: np.ndarray,
    states: Tensor,
    words: csr_matrix,
    targets: np.ndarray,
    weights: np.ndarray,
) -> dict[str, Tensor]:
    """The head: the weighted sum of both logits, scaled and shifted to fit the targets (Platt 1999).

    Args:
        of_words: [2 * BUCKETS], the words' weights; their bias is no matter.
        states, words, targets, weights: as in `fit_sense` and `fit_words`.
    """
    sum_of_both = (1 - WORD_SHARE) * sense_logits(states, sense).numpy() + WORD_SHARE * (words @ of_words)
    slope, shift = fit_words(csr_matrix(sum_of_both[:, None]), targets, weights, penalty=0)
    scale = float(slope[0])
    return dict(sense) | {
        "sense": scale * (1 - WORD_SHARE) * sense["sense"],
        "words": torch.from_numpy(scale * WORD_SHARE * of_words).float(),
        "bias": scale * (1 - WORD_SHARE) * sense["bias"] + shift,
    }


def _fit_network(states: Tensor, targets: np.ndarray, weights: np.ndarray) -> torch.nn.Sequential:
    torch.manual_seed(0)
    steps = EPOCHS * len(states) // BATCH
    drawn = torch.multinomial(torch.from_numpy(weights), steps * BATCH, replacement=True).view(steps, BATCH)
    expected = torch.from_numpy(targets).float()
    network = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT),
        torch.nn.Linear(states.shape[1], HIDDEN),
        torch.nn.GELU(),
        torch.nn.Dropout(DROPOUT),
        torch.nn.Linear(HIDDEN, 1),
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for rows in drawn:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(states[rows])[:, 0], expected[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network


def fit_words(
    words: csr_matrix, targets: np.ndarray, weights: np.ndarray, penalty: float = WORD_PENALTY
) -> tuple[np.ndarray, float]:
    """Logistic regression with an L2 penalty: a weight for each n-gram, and the bias.

    Minimizes sum(weights * cross-entropy) / sum(weights) + penalty / 2 * |weights of n-grams|^2 by L-BFGS.
    """
    share, transposed = weights / weights.sum(), words.T.tocsr()

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = words @ parameters[:-1] + parameters[-1]
        error = share * (1 / (1 + np.exp(-logits)) - targets)
        value = share @ (np.logaddexp(0, logits) - targets * logits) + penalty / 2 * parameters[:-1] @ parameters[:-1]
        return value, np.append(transposed @ error + penalty * parameters[:-1], error.sum())

    found = minimize(loss, np.zeros(words.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 60}).x
    return found[:-1].astype(np.float32), float(found[-1])


def encode(texts: Sequence[str], folder: str, cache: Path) -> Tensor:
    """The states of texts [N, STATES], sorted by length on the way; kept in `cache`, for another try with the same texts."""
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    if cache.exists() and (stored := np.load(cache))["key"] == key:
        return torch.from_numpy(stored["states"]).float()
    encoder, order = Encoder(folder, "cpu"), np.argsort([len(text) for text in texts], kind="stable")
    states = torch.cat([encoder([texts[row] for row in rows]) for rows in np.array_split(order, max(1, len(order) // 32))])
    found = torch.empty_like(states).index_copy_(0, torch.from_numpy(order), states)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, key=key, states=found.half().numpy())
    return found.half().float()


def imitate(teacher: Teacher, found: Sequence[Source], words: csr_matrix) -> np.ndarray:
    """Weights of n-grams [2 * BUCKETS] that go between a teacher of words and the targets.

    The teacher scores texts without labels and its own vocabulary, too; on these it is the only target. Both kinds of
    texts have the same weight as a whole.

    Args:
        words: [N, 2 * BUCKETS] of all texts of the sources, one source after the other.
    """
    texts, learned, targets, weights = flatten(found)
    learned_texts = [text for text, kept in zip(texts, learned, strict=True) if kept]
    between = (teacher(learned_texts) + log_odds(targets[learned])) / 2
    others = [*pieces_without_labels(learned_texts), *teacher.words]
    share = weights[learned] / weights[learned].sum() * len(others)
    of_words, _ = fit_words(
        vstack([words[learned], count_words(others)], format="csr"),
        expit(np.concatenate([between, teacher(others)])),
        np.concatenate([share, np.ones(len(others))]),
    )
    return of_words


def log_odds(targets: np.ndarray) -> np.ndarray:
    """Of targets from 0 to 1, where 0 counts as 0.01 and 1 as 0.99."""
    return logit(targets.clip(0.01, 0.99))


def flatten(found: Sequence[Source]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """All texts of the sources; whether each is learned from [N], its target [N] and its weight in the loss [N]."""
    return (
        [text for source in found for text in source.texts],
        ~np.concatenate([source.held_out for source in found]),
        np.concatenate([source.targets for source in found]),
        np.concatenate([np.full(len(source.texts), source.weight / (~source.held_out).sum()) for source in found]),
    )


def train(folder: Path, encoder: str, cache: Path) -> tuple[dict[str, Tensor], list[Source], Tensor, csr_matrix]:
    """Fit the head to four fifths of each source; returns it with the sources, and states and words of all their texts."""
    found = sources(folder)
    texts, learned, targets, weights = flatten(found)
    states, words = encode(texts, encoder, cache), count_words(texts)
    rows = torch.from_numpy(learned)
    # Each part alone: together, the words would explain the training texts before the hidden layer learns anything.
    sense = fit_sense(states[rows], targets[learned], weights[learned])
    of_words = imitate(Teacher(), found, words)
    head = combine(sense, of_words, states[rows], words[learned], targets[learned], weights[learned])
    return head, found, states, words
