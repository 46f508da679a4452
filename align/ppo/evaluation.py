"""Evaluation on fixed prompts during PPO: its metrics, and the choice of the policy to keep."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from torch import Tensor

from align.core.files import new_folder
from align.ppo.metrics import response_metrics
from align.ppo.records import RoleOutputs, Rollout
from align.ppo.rewards import apply_missing_eos
from align.runtime.distributed import run_on_main
from align.training.run import Run


@dataclass
class PolicyEvaluation:
    """Responses to the fixed prompts and their scores, which extensions may change before metrics are computed."""

    update: int
    """0: before the first one."""
    rollout: Rollout
    scores: Tensor
    """[B] rewards, before the penalty for a missing EOS."""
    penalty: float = 0.0
    """Subtracted from all scores, after the penalty for a missing EOS."""
    violated_constraint: str = ""
    """Such as "over the rule budgets": a policy that violates none is better."""
    selection_scores: Tensor | None = None
    """[B] by which the policy to keep is selected; None: `scores`."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[B] each: further columns of samples.jsonl."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics, which are logged as `validation/<name>`."""

    def final_scores(self, missing_eos_penalty: float | None, missing_eos_score: float | None) -> Tensor:
        """Return scores [B] with the penalty for a missing EOS, which must not replace `penalty`."""
        return apply_missing_eos(self.scores, self.rollout.ended_mask, missing_eos_penalty, missing_eos_score) - self.penalty


@dataclass(frozen=True)
class Candidate:
    """The evaluation of a policy."""

    update: int
    """0: the initial policy."""
    scores: list[float]
    """Of its responses to the fixed prompts [B]."""
    violated_constraint: str = ""
    """Such as "over the rule budgets": a policy that violates none is better."""


def is_better(candidate: Candidate, best: Candidate | None, confidence: float = 0.0, evaluations: int = 1) -> bool:
    """Whether a policy is better than the best one so far: by constraints, then by scores; arguments as `is_new_best`."""
    if best is None or bool(candidate.violated_constraint) == bool(best.violated_constraint):
        return is_new_best(candidate.scores, best.scores if best else None, confidence, evaluations)
    return not candidate.violated_constraint and math.isfinite(fmean(candidate.scores))


def is_new_best(
    scores: Sequence[float], best: Sequence[float] | None, confidence: float = 0.0, evaluations: int = 1
) -> bool:
    """Whether the policy of an evaluation is better than the best one so far.

    The test is paired, because both answered the same prompts. Its level is divided by the number of evaluations
    (Bonferroni): the best of many noisy means is often luck.

    Args:
        scores: of the policy's responses to the fixed prompts [B].
        best: those of the best policy so far [B], None for none; of equal means the first stays.
        confidence: that the mean is higher, by a one-sided paired test (normal approximation) which errs at most
            once in 1 / (1 - confidence) runs; 0: any higher mean will do.
        evaluations: of the whole run.
    """
    if best is None:
        return math.isfinite(fmean(scores))
    differences = [new - old for new, old in zip(scores, best, strict=True)]
    mean = fmean(differences)
    if not confidence or len(differences) < 2:
        return mean > 0
    quantile = NormalDist().inv_cdf(1 - (1 - confidence) / evaluations)
    return mean > quantile * stdev(differences) / math.sqrt(len(differences))


class PolicySelection:
    """The best policy so far.

    Without a test (`confidence` 0), the best of the trained policies is kept; with one, the initial policy is kept first.

    Args:
        confidence: see `is_new_best`.
        evaluations: of the whole run.
        max_kl: largest KL to the initial policy, in nats per response, of a policy that is kept.
        critic_warmup: first updates, in which the policy does not change.
        score_name: a name of the scores, for warnings.
    """

    def __init__(
        self, confidence: float, evaluations: int, max_kl: float, critic_warmup: int = 0, score_name: str = "reward"
    ) -> None:
        self.confidence, self.evaluations, self.max_kl = confidence, evaluations, max_kl
        self.critic_warmup, self.score_name = critic_warmup, score_name
        self.initial: Candidate | None = None
        self.best: Candidate | None = None

    def update(self, candidate: Candidate, kl: float) -> bool:
        """Record an evaluated policy; return whether it is the best one so far."""
        if not kl <= self.max_kl:  # nor one that is not a number
            return False
        if candidate.update == 0:
            self.initial = candidate
        if candidate.update <= self.critic_warmup and not (self.confidence and candidate.update == 0):
            return False
        if not is_better(candidate, self.best, self.confidence, self.evaluations):
            return False
        self.best = candidate
        return True

    def warning(self) -> str:
        """A warning if the kept policy violates a constraint or is not better than the initial policy; else ""."""
        initial, best = self.initial, self.best
        if initial is None or best is None:
            return ""
        constraint = best.violated_constraint
        suffix = f"; it is {constraint}, as every policy that was evaluated" if constraint else ""
        if best.update == 0:
            level = f"best_policy_confidence {self.confidence:g}"
            return f"warning: no policy was better than the initial policy at {level}: that is what was kept{suffix}"
        if is_better(best, initial):
            return f"warning: the policy of update {best.update} was kept{suffix}" if suffix else ""
        means = f"{fmean(best.scores):.3g}, that of the initial policy {fmean(initial.scores):.3g}"
        what = f"the kept policy, of update {best.update}, is no better than the initial policy"
        return f"warning: {what}: its {self.score_name} is {means}{suffix}"

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations of the kept policy and of the initial policy."""
        return {name: found and asdict(found) for name, found in (("best", self.best), ("initial", self.initial))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.initial = (Candidate(**found) if found else None for found in (state["best"], state["initial"]))


def take_over_best_policy(run: Run, selection: PolicySelection) -> None:
    """Copy the best policy of the run whose checkpoint this one continues, if that is another run.

    The other run may have kept a later policy since. The selection then starts again without a best policy.
    """
    best, checkpoint = selection.best, run.checkpoint
    if best is None or checkpoint is None or run.continues_own:
        return
    source = checkpoint.resolve().parents[1] / "model"

    def is_there() -> bool:
        card = source / "README.md"
        row = f"| update | {best.update:.4g} |"  # as `save_policy` writes it
        return card.is_file() and row in card.read_text(encoding="utf-8").splitlines()

    run.open()
    if run_on_main(is_there, run.accelerator):
        run_on_main(lambda: _copy_folder(source, run.folder / "model"), run.accelerator)
        return
    selection.best = None
    run.print(f"{source} is not the best policy of {checkpoint}, of update {best.update}: only later ones can be kept")


def _copy_folder(source: Path, target: Path) -> None:
    with new_folder(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)


def evaluation_metrics(evaluation: PolicyEvaluation, scores: Tensor, outputs: RoleOutputs) -> dict[str, float]:
    """Return the metrics of an evaluation, without their prefix.

    Args:
        scores: [B] with all penalties.
        outputs: of the roles, for the KL to the initial policy.
    """
    rollout, initial = evaluation.rollout, outputs.initial_log_probs
    kl = (outputs.log_probs - (outputs.ref_log_probs if initial is None else initial)).sum()
    return {
        **mean_and_error("reward", scores),
        "kl": float(kl / len(rollout)),
        "kl_per_token": float(kl / rollout.lengths.sum()),
        **response_metrics(rollout),
        **evaluation.metrics,
    }


def mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of some values [B] and its standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {name: float(values.mean()), f"{name}_error": error}


def sample_rows(evaluation: PolicyEvaluation, scores: Tensor) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl."""
    rollout, columns = evaluation.rollout, evaluation.columns
    return [
        {
            "prompt": list(prompt.conversation),
            "response": rollout.texts[row],
            "reward": float(scores[row]),
            "ended": rollout.ended[row],
            "category": prompt.category,
            **{name: float(values[row]) for name, values in columns.items()},
        }
        for row, prompt in enumerate(rollout.prompts)
    ]
