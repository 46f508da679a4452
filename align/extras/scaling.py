"""Scaling laws for `align plan`: compute-optimal model size and tokens, from published fits or the user's runs.

Hoffmann et al. 2022, "Training compute-optimal large language models" (Chinchilla), arXiv 2203.15556. N is parameters, D
training tokens, C = 6 N D training FLOPs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar, nnls

from align.core.errors import UserError
from align.data.fields import field_error, required_field
from align.data.readers import parse_rows

FLOPS_PER_WEIGHT = 6
"""Training FLOPs per weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)."""
INFERENCE_FLOPS_PER_WEIGHT = 2
CHINCHILLA_TABLE = (
    (1.92e19, 400e6),
    (1.21e20, 1e9),
    (1.23e22, 10e9),
    (5.76e23, 67e9),
    (3.85e24, 175e9),
    (9.90e24, 280e9),
    (3.43e25, 520e9),
    (1.27e26, 1e12),
    (1.30e28, 10e12),
)
"""FLOPs and parameters of table 3 (approach 1). Its tokens are FLOPs / 6 N, except for 67 billion: 1.5e12, not 1.43e12."""
MIN_SIZES, MIN_RUNS = 3, 6
"""Minimum numbers of distinct sizes, of distinct token counts, and of runs, to fit five coefficients."""
HUBER_DELTA = 1e-3
"""Delta of the Huber loss of log losses (Chinchilla, appendix D.3)."""
EXPONENTS = np.linspace(0.1, 1.5, 15)
"""Initial values of both exponents in the fit."""


class ScalingLaw(NamedTuple):
    """Chinchilla's L(N, D) = E + A / N^alpha + B / D^beta, with the loss in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model of this size after this many tokens."""
        return float(self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta)

    def allocate(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens with the lowest loss for 6 N D = `flops` (equation 4 of the paper)."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = scale * (flops / FLOPS_PER_WEIGHT) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / (FLOPS_PER_WEIGHT * parameters)

    def tokens_for(self, loss: float, parameters: float) -> float:
        """Return the number of tokens for a model of this size to reach a loss; infinity if never."""
        rest = loss - self.E - self.A * parameters**-self.alpha
        return float((self.B / rest) ** (1 / self.beta)) if rest > 0 else math.inf

    def allocate_with_inference(self, flops: float, inference_tokens: float) -> tuple[float, float]:
        """Return the parameters and tokens that reach the loss of `allocate(flops)` with the fewest total FLOPs.

        The sum is 6 N D for training and 2 N for each token of inference. A smaller model that is trained longer is cheaper
        to use, as argued in LLaMA (Touvron et al. 2023, section 1). Formula: Sardana et al. 2023 (equation 3, arXiv
        2401.00448).
        """
        largest, _ = self.allocate(flops)
        loss = self.loss(*self.allocate(flops))
        smallest = (self.A / (loss - self.E)) ** (1 / self.alpha)  # size that reaches the loss with infinite tokens

        def total(log_size: float) -> float:
            size = math.exp(log_size)
            return size * (FLOPS_PER_WEIGHT * self.tokens_for(loss, size) + INFERENCE_FLOPS_PER_WEIGHT * inference_tokens)

        bounds = (math.log(smallest) + 1e-9, math.log(largest))
        size = math.exp(minimize_scalar(total, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)
        return size, self.tokens_for(loss, size)


CHINCHILLA_FIT = ScalingLaw(E=1.6934, A=406.4, B=410.7, alpha=0.3392, beta=0.2849)
"""Approach 3 (equation 10), with the digits of the paper's TeX source, which reproduce its table A3."""
REPLICATED_FIT = ScalingLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
"""The same runs fitted again: Besiroglu et al. 2024, "Chinchilla Scaling: A replication attempt", arXiv 2404.10102."""


def allocate(flops: float) -> tuple[float, float]:
    """Return the parameters and tokens of Chinchilla's table 3 for a budget, interpolated by power laws."""
    budgets, sizes = np.log(CHINCHILLA_TABLE).T
    row = int(np.clip(np.searchsorted(budgets, math.log(flops)) - 1, 0, len(budgets) - 2))
    slope = (sizes[row + 1] - sizes[row]) / (budgets[row + 1] - budgets[row])
    parameters = math.exp(sizes[row] + slope * (math.log(flops) - budgets[row]))
    return parameters, flops / (FLOPS_PER_WEIGHT * parameters)


class TrainingRun(NamedTuple):
    """A finished run: parameters, tokens, and the final loss in nats per token."""

    parameters: float
    tokens: float
    loss: float


def read_training_runs(path: str) -> list[TrainingRun]:
    """Read runs from rows with the fields N, D and loss, all above 0.

    Raises:
        UserError: if a row is invalid, or there are too few runs for a fit.
    """
    runs = parse_rows([path], _run_of_row, "no runs; each row needs N (parameters), D (tokens) and loss")
    sizes, lengths = {run.parameters for run in runs}, {run.tokens for run in runs}
    if len(runs) < MIN_RUNS or min(len(sizes), len(lengths)) < MIN_SIZES:
        had = f"{len(runs)} runs with {len(sizes)} model sizes (N) and {len(lengths)} token counts (D)"
        raise UserError(
            f"{path}: {had}; a fit needs {MIN_RUNS} runs, with {MIN_SIZES} different N and {MIN_SIZES} different D"
        )
    return runs


def _run_of_row(row: Mapping[str, Any], _number: str) -> list[TrainingRun]:
    return [TrainingRun(*(_positive(row, name) for name in ("N", "D", "loss")))]


def _positive(row: Mapping[str, Any], name: str) -> float:
    value = required_field(row, name, "add a number above 0")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise field_error(name, f"is {value!r}", "use a number above 0")
    return number


def fit_scaling_law(runs: Sequence[TrainingRun]) -> ScalingLaw:
    """Fit the five coefficients with the Huber loss of log losses, as in Chinchilla's approach 3.

    For each pair of starting exponents, E, A and B are fitted by least squares; L-BFGS then improves the five best starts.

    Raises:
        UserError: if the runs do not show that both size and tokens lower the loss.
    """
    sizes, tokens, losses = (np.array(column) for column in zip(*runs, strict=True))
    starts = []
    for alpha in EXPONENTS:
        for beta in EXPONENTS:
            columns = np.column_stack([np.ones(len(runs)), sizes**-alpha, tokens**-beta]) / losses[:, None]
            scale = columns.max(axis=0)
            factors, error = nnls(columns / scale, np.ones(len(runs)))
            starts.append((error, *np.maximum(factors / scale, 1e-12), alpha, beta))
    log_sizes, log_tokens, log_losses = np.log(sizes), np.log(tokens), np.log(losses)

    def huber(numbers: np.ndarray) -> float:
        e, a, b, alpha, beta = numbers
        predicted = np.logaddexp(np.logaddexp(a - alpha * log_sizes, b - beta * log_tokens), e)
        error = np.abs(predicted - log_losses)
        return float(np.where(error < HUBER_DELTA, error**2 / 2, HUBER_DELTA * (error - HUBER_DELTA / 2)).sum() * 1e6)

    fits = []
    for _, e, a, b, alpha, beta in sorted(starts)[:5]:
        start = np.array([*np.log([e, a, b]), alpha, beta])
        fits.append(minimize(huber, start, method="L-BFGS-B", options={"maxiter": 5000, "maxfun": 50_000}))
    e, a, b, alpha, beta = min(fits, key=lambda fit: float(fit.fun)).x
    law = ScalingLaw(*map(float, (*np.exp([e, a, b]), alpha, beta)))
    smallest_share = min(law.A * sizes.min() ** -law.alpha, law.B * tokens.min() ** -law.beta) / losses.mean()
    if min(law.alpha, law.beta) <= 0 or smallest_share < 1e-4:
        raise UserError("runs: the losses do not decrease with both N and D; add runs that vary one of them at a time")
    return law
