"""Scaling laws: the model and the tokens that are best for a compute budget, and the fit of a law to runs of one's own.

Hoffmann et al. 2022, "Training compute-optimal large language models" (Chinchilla), arXiv 2203.15556.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy

from align.core.errors import UserError
from align.data.sources import iter_rows

FLOPS_PER_WEIGHT = 6
"""FLOPs of training for each weight and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)."""
SMALLEST, LARGEST = (400e6, 1.92e19), (10e12, 1.30e28)
"""Parameters and FLOPs in the first and the last row of Chinchilla's table 3: sizes between them lie on a power law."""
HUBER_DELTA = 1e-3
"""Where the loss of a residual of log loss turns from a square to a line (Chinchilla, section 3.3)."""
STARTS = {"alpha": (0.2, 0.6), "beta": (0.2, 0.6), "e": (-1.0, 0.5), "a": (2.0, 8.0, 16.0), "b": (2.0, 8.0, 16.0)}
"""Where the fit starts, as in Chinchilla's section D.3 from a grid: the exponents, and the logarithms of E, A and B."""
FEWEST_RUNS = 6
"""The law has five numbers."""


class Allocation(NamedTuple):
    """How a compute budget is spent."""

    parameters: float
    tokens: float


class ScalingLaw(NamedTuple):
    """The loss L(N, D) = E + A / N^alpha + B / D^beta of N parameters after D tokens, in nats per token."""

    irreducible: float
    """E: what no model and no data removes."""
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats per token."""
        return float(self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def allocate(self, flops: float) -> Allocation:
        """The parameters and tokens of the lowest loss for a number of FLOPs (Chinchilla, equation 4)."""
        scale = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = scale * (flops / FLOPS_PER_WEIGHT) ** (self.beta / (self.alpha + self.beta))
        return Allocation(parameters, flops / (FLOPS_PER_WEIGHT * parameters))


class TrainedRun(NamedTuple):
    """One point of a law: a model's parameters, the tokens it was trained on, and its final loss in nats per token."""

    parameters: float
    tokens: float
    loss: float


def allocate(flops: float) -> Allocation:
    """The parameters and tokens that Chinchilla's table 3 gives for a number of FLOPs, about 20 tokens a parameter."""
    exponent = math.log(LARGEST[0] / SMALLEST[0]) / math.log(LARGEST[1] / SMALLEST[1])
    parameters = SMALLEST[0] * (flops / SMALLEST[1]) ** exponent
    return Allocation(parameters, flops / (FLOPS_PER_WEIGHT * parameters))


def read_runs(path: str) -> list[TrainedRun]:
    """Runs to fit a law to: rows with `parameters`, `tokens` and `loss`.

    Raises:
        UserError: for a row without them, or with a number that is not above 0.
    """
    runs = []
    for item in iter_rows(path):
        row = item.row if isinstance(item.row, dict) else {}
        numbers = []
        for name in TrainedRun._fields:
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{item.where}: '{name}' must be a number above 0 in each row of the runs to fit")
            numbers.append(float(value))
        runs.append(TrainedRun(*numbers))
    return runs


def fit(runs: Sequence[TrainedRun]) -> ScalingLaw:
    """The law of some runs by Chinchilla's third approach: the Huber loss of log loss, from a grid of starts.

    Raises:
        UserError: for too few runs, or if all have one size or one number of tokens.
    """
    from scipy.optimize import least_squares

    sizes, counts = ({getattr(run, name) for run in runs} for name in ("parameters", "tokens"))
    if len(runs) < FEWEST_RUNS or len(sizes) < 2 or len(counts) < 2:
        raise UserError(
            f"a law has five numbers, but there are {len(runs)} runs of {len(sizes)} sizes on {len(counts)} numbers of "
            f"tokens; give at least {FEWEST_RUNS} runs that differ in both"
        )
    log_n, log_d, log_loss = (numpy.log([getattr(run, name) for run in runs]) for name in TrainedRun._fields)

    def terms(x: numpy.ndarray) -> numpy.ndarray:
        alpha, beta, e, a, b = x
        return numpy.stack([numpy.full_like(log_n, e), a - alpha * log_n, b - beta * log_d])

    def residuals(x: numpy.ndarray) -> numpy.ndarray:
        return numpy.asarray(numpy.logaddexp.reduce(terms(x)) - log_loss)

    def slopes(x: numpy.ndarray) -> numpy.ndarray:
        all_terms = terms(x)
        e, a, b = numpy.exp(all_terms - numpy.logaddexp.reduce(all_terms))  # the share of each term in the loss
        return numpy.stack([-log_n * a, -log_d * b, e, a, b], axis=1)

    def from_start(start: Sequence[float], evaluations: int) -> tuple[float, numpy.ndarray]:
        # Two numbers of the law may be strongly correlated: the tolerances are far below what is reported.
        tolerances = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14, "max_nfev": evaluations}
        found = least_squares(
            residuals, start, slopes, loss="huber", f_scale=HUBER_DELTA, x_scale="jac", **tolerances
        )  # fmt: skip
        return float(found.cost), found.x

    rough = [from_start(start, 20) for start in itertools.product(*STARTS.values())]
    best = min(rough, key=lambda pair: pair[0])[1]
    alpha, beta, *logs = from_start(best.tolist(), 10_000)[1].tolist()
    e, a, b = map(math.exp, logs)
    return ScalingLaw(e, a, b, alpha, beta)


def fit_file(path: str) -> tuple[ScalingLaw, int]:
    """The law of the runs in a file, and their number.

    Raises:
        UserError: if the file cannot be read or fitted.
    """
    runs = read_runs(path)
    try:
        return fit(runs), len(runs)
    except UserError as error:
        raise UserError(f"{Path(path)}: {error}") from error
