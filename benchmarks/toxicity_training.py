"""How the default toxicity scorer is trained: `python -m benchmarks.toxicity train`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from torch import Tensor

from align.eval.toxicity.head import Encoder, count_words
from benchmarks.toxicity_data import Source, sources

HIDDEN, DROPOUT, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 96, 0.4, 10, 256, 1e-3, 1e-2
WORD_PENALTY = 3e-6
WORD_SHARE = 0.15
"""Of the words' logit in the sum, the rest is the sense's: chosen among 0 to 0.7 on the held-out fifths."""


def fit(states: Tensor, words: csr_matrix, targets: np.ndarray, weights: np.ndarray) -> dict[str, Tensor]:
    """The head: both parts by cross-entropy with soft targets, each alone, and then their weighted sum.

    Together, the words would explain the training texts before the hidden layer learns anything.

    Args:
        states: [N, STATES].
        words: [N, 2 * BUCKETS].
        targets: [N] from 0 to 1.
        weights: [N] of each text in the loss.
    """
    # A few maxima are the same for nearly all texts: divided by what they vary, their weights would leave half precision.
    mean, scale = states.mean(0), states.std(0).clamp(min=0.1)
    network = _fit_sense((states - mean) / scale, targets, weights)
    first, last = network[1], network[4]
    of_words, bias_of_words = fit_words(words, targets, weights)
    hidden = first.weight.detach() / scale
    return {
        "hidden.weight": hidden,
        "hidden.bias": first.bias.detach() - hidden @ mean,
        "sense": (1 - WORD_SHARE) * last.weight.detach()[0],
        "words": WORD_SHARE * torch.from_numpy(of_words),
        "bias": (1 - WORD_SHARE) * last.bias.detach()[0] + WORD_SHARE * bias_of_words,
    }


def _fit_sense(states: Tensor, targets: np.ndarray, weights: np.ndarray) -> torch.nn.Sequential:
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


def train(folder: Path, encoder: str, cache: Path) -> tuple[dict[str, Tensor], list[Source], Tensor, csr_matrix]:
    """Fit the head to four fifths of each source; returns it with the sources, and states and words of all their texts."""
    found = sources(folder)
    texts = [text for source in found for text in source.texts]
    states, words = encode(texts, encoder, cache), count_words(texts)
    learned = ~np.concatenate([source.held_out for source in found])
    targets = np.concatenate([source.targets for source in found])
    weights = np.concatenate([np.full(len(source.texts), source.weight / (~source.held_out).sum()) for source in found])
    head = fit(states[torch.from_numpy(learned)], words[learned], targets[learned], weights[learned])
    return head, found, states, words
