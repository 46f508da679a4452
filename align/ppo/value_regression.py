"""Fit the value head in closed form: ridge regression of returns on the critic's hidden states.

With a value head that starts at 0, nearly equal scores become advantages that depend only on the position. Whitening
scales these to unit variance, and several epochs can ruin a policy within one update. Gradient steps on the head have the
size of the learning rate, however small its error is. The head is linear, so a regression fits it before the policy
changes, and again on every rollout.

Values fitted to a response's own return would hide its advantage. The values of a prompt's responses are therefore
cross-fitted: they come from a regression on other prompts, of this rollout and of earlier ones.
"""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.models.heads import ValueHead, running_mean
from align.runtime.distributed import gather_rows, sum_across_processes

RIDGES = tuple(10.0**exponent for exponent in range(-3, 4))
"""Ridge penalties relative to the mean variance of a hidden unit. Cross-validation selects one, or only the mean."""
FOLDS = 5
DECAY = 0.9
"""Weight of a rollout relative to the next one, because the policy and its returns change."""


class ValueRegression:
    """Fits a value head to rollouts.

    Attributes:
        moments: [folds, H + 2, H + 2] sums over tokens of products of [state, 1, return], in float64. None before the first
            rollout. A state is the mean of hidden states up to a token.
    """

    def __init__(self, head: ValueHead, accelerator: Accelerator) -> None:
        self.head, self.accelerator = head, accelerator
        self.moments: Tensor | None = None

    def fit(
        self, states: Mapping[int, Tensor], returns: Tensor, lengths: Tensor, samples_per_prompt: int
    ) -> tuple[Tensor, Tensor] | None:
        """Add a rollout to the regression and fit the head; return cross-fitted and fitted values [B, T] of the rollout.

        Return None for a rollout of a single response, which does not change the head, because it cannot be validated.

        Args:
            states: hidden states [n, H] before the tokens of each row that this process computed.
            returns: [B, T] Monte Carlo returns, which do not depend on values.
            lengths: [B] response tokens.
            samples_per_prompt: number of adjacent rows with the same prompt, which stay in one fold.
        """
        rows = len(lengths)
        group = samples_per_prompt if rows > samples_per_prompt else 1
        if rows < 2:
            return None
        fold_of_row = [row // group % FOLDS for row in range(rows)]
        size, device = self.head.linear.in_features + 2, self.accelerator.device
        moments = torch.zeros(FOLDS, size, size, dtype=torch.float64, device=device)
        features: dict[int, Tensor] = {}
        for row, hidden in states.items():
            features[row] = torch.cat([running_mean(hidden.float()), torch.ones(len(hidden), 1)], 1).to(device)
            products = torch.cat([features[row], returns[row, : len(hidden), None].to(device)], 1).double()
            moments[fold_of_row[row]] += products.T @ products
        moments = sum_across_processes(moments, self.accelerator)
        if self.moments is not None:
            moments += DECAY * self.moments.to(device)
        self.moments = moments
        # Regressions fitted without a fold are validated on it.
        total = moments.sum(0)
        cross_fits = {fold: ridge_regressions(total - moments[fold]) for fold in sorted({*fold_of_row})}
        errors = torch.stack([squared_errors(fit, moments[fold]) for fold, fit in cross_fits.items()]).sum(0)
        best = int(errors.argmin())
        coefficients = ridge_regressions(total)[best]
        self.head.fitted = (coefficients[:-1].float(), coefficients[-1].float())
        both = {fold: torch.stack([fit[best], coefficients]).float() for fold, fit in cross_fits.items()}
        values = [(row, (both[fold_of_row[row]] @ columns.T).cpu()) for row, columns in features.items()]
        everywhere = dict(gather_rows(values, self.accelerator))
        cross_fitted, fitted = zip(*(everywhere[row] for row in range(rows)), strict=True)
        return pad_sequence(list(cross_fitted), batch_first=True), pad_sequence(list(fitted), batch_first=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the moments and the fitted term of the head; empty before the first rollout."""
        if self.moments is None or self.head.fitted is None:
            return {}
        weight, bias = self.head.fitted
        return {"moments": self.moments, "weight": weight, "bias": bias}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `state_dict`."""
        if state:
            device = self.head.linear.weight.device
            self.moments = state["moments"].to(device)
            self.head.fitted = (state["weight"].to(device), state["bias"].to(device))


def ridge_regressions(moments: Tensor) -> Tensor:
    """Return the coefficients [R + 1, H + 1] of regressions with each of the R `RIDGES`, the constant's last.

    The last regression fits only the constant, which is not penalized.

    Args:
        moments: [H + 2, H + 2] sums of products of [features, 1, target].
    """
    moments = moments / moments[-2, -2]
    means, target_mean = moments[:-2, -2], moments[-1, -2]
    covariance = moments[:-2, :-2] - means[:, None] * means
    slopes = (moments[:-2, -1] - means * target_mean)[:, None]
    # Slightly above rounding error, in case all states are equal.
    scale = torch.maximum(covariance.diagonal().mean(), 1e-9 * moments[:-2, :-2].diagonal().mean() + 1e-30)
    identity = torch.eye(len(means)).to(covariance)
    factors = (torch.linalg.cholesky(covariance + ridge * scale * identity) for ridge in RIDGES)
    weights = torch.stack([*(torch.cholesky_solve(slopes, factor)[:, 0] for factor in factors), torch.zeros_like(means)])
    return torch.cat([weights, (target_mean - weights @ means)[:, None]], 1)


def squared_errors(coefficients: Tensor, moments: Tensor) -> Tensor:
    """Return the sums of squared errors [R] of linear predictions over the tokens of `moments`.

    Args:
        coefficients: [R, H + 1].
        moments: [H + 2, H + 2], as for `ridge_regressions`.
    """
    residual = torch.cat([coefficients, -torch.ones_like(coefficients[:, :1])], 1)
    return ((residual @ moments) * residual).sum(1)
