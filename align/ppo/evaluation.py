"""Evaluation on fixed prompts during PPO: its metrics, and the choice of the policy to keep."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from torch import Tensor

from align.core.errors import UserError
from align.core.files import new_folder
from align.core.seeds import RngStream
from align.core.settings import dump
from align.models.checkpoint import WriteModel, save_model, update_in_card, weights_of
from align.ppo.config import EvaluationConfig
from align.ppo.extensions import PolicyEvaluation
from align.ppo.metrics import DriftWatch, mean_and_error, response_metrics
from align.ppo.records import Rollout
from align.ppo.rollout import forward_all_roles, sample_rollout
from align.ppo.setup import PPOSetup, save_if_scoring_fails
from align.runtime.distributed import run_on_main
from align.training.checkpoint.checkpoint import Stateful
from align.training.data_order import changed_measure, measured_on
from align.training.run import Run


@dataclass(frozen=True)
class Candidate:
    """The evaluation of a policy."""

    update: int
    """0 for the initial policy."""
    scores: list[float]
    """[B] scores of its responses to the fixed prompts."""


def is_better(candidate: Candidate, best: Candidate | None) -> bool:
    """Return whether a policy has a higher mean score than the best one so far. The first of equals stays."""
    if best is None:
        return math.isfinite(fmean(candidate.scores))
    return fmean(new - old for new, old in zip(candidate.scores, best.scores, strict=True)) > 0


class PolicySelection:
    """The best policy so far; the initial policy is a candidate.

    Args:
        max_kl: maximum KL of a saved policy to the initial policy, in nats per response.
        critic_warmup: number of initial updates in which the policy does not change.
        score_name: name of the scores in warnings.
        measure: data and settings of the scores, see `measured_on`. None if they never change.
    """

    def __init__(
        self,
        max_kl: float,
        critic_warmup: int = 0,
        score_name: str = "reward",
        measure: Mapping[str, Any] | None = None,
    ) -> None:
        self.max_kl, self.critic_warmup, self.score_name = max_kl, critic_warmup, score_name
        self.best: Candidate | None = None
        self.measure = self.measured_before = dict(measure or {})

    def forget_if_changed(self) -> str:
        """Forget the scores of a resumed run if the data or settings of scores have changed. Return a line, or ""."""
        line = changed_measure(self.measured_before, self.measure)
        if line:
            self.best = None
        return line

    def update(self, candidate: Candidate, kl: float) -> bool:
        """Record an evaluated policy; return whether it is the best one so far."""
        if not kl <= self.max_kl:  # also true for NaN
            return False
        is_initial_again = 0 < candidate.update <= self.critic_warmup
        if is_initial_again or not is_better(candidate, self.best):
            return False
        self.best = candidate
        return True

    def warning(self) -> str:
        """Return a warning if the initial policy is kept because no later one is better; else ""."""
        if self.best is None or self.best.update:
            return ""
        mean = fmean(self.best.scores)
        return f"warning: no evaluation has a higher {self.score_name} than the initial policy ({mean:.3g}), which is kept"

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluation of the kept policy, with its data and settings."""
        return {"best": self.best and asdict(self.best), "measure": self.measure}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        best = state["best"]
        self.best = Candidate(best["update"], best["scores"]) if best else None
        self.measured_before = state.get("measure", self.measure)  # a checkpoint of an earlier version lacks it


MEASURE_SETTINGS = (
    *("reward_model", "reward_ensemble", "uncertainty_weight", "reward_functions", "rubrics", "attributes", "rules"),
    *("extensions", "missing_eos_penalty", "missing_eos_score", "max_new_tokens", "stop_token_ids", "ignore_eos"),
    *("temperature", "max_kl", "selection"),
)
"""Settings that affect a policy's scores on the fixed prompts."""


def measure_of(setup: PPOSetup) -> dict[str, Any]:
    """Return the data and settings that affect the scores of policies."""
    settings: dict[str, Any] = yaml.safe_load(dump(setup.run.config))
    chosen = {name: settings[name] for name in MEASURE_SETTINGS if name in settings}
    return measured_on("validation_prompts", [prompt.ids for prompt in setup.validation], **chosen)


def copy_best_policy(run: Run, selection: PolicySelection) -> None:
    """Copy the best policy of the run from whose checkpoint this run continues, if it is another run.

    The other run may have kept a later policy since. The selection then starts again without a best policy.
    """
    best, checkpoint = selection.best, run.checkpoint
    if best is None or checkpoint is None or run.continues_own:
        return
    source = checkpoint.resolve().parents[1] / "model"

    def copy() -> None:
        with new_folder(run.folder / "model") as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)

    run.open()
    if run_on_main(lambda: update_in_card(source), run.accelerator) == best.update:
        run_on_main(copy, run.accelerator)
        return
    selection.best = None
    run.print(f"{source} is not the best policy of {checkpoint}, of update {best.update}: only later ones can be kept")


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


class Evaluator:
    """Evaluates the policy on the fixed prompts, and keeps the best one in the folder `model` of the run.

    Args:
        config: settings of evaluation and checkpoint selection.
    """

    def __init__(self, setup: PPOSetup, config: EvaluationConfig, total_updates: int, critic_warmup: int) -> None:
        self.setup, self.config, self.total_updates = setup, config, total_updates
        self.folder, self.drift = setup.run.folder / "model", DriftWatch()
        self.stale = 0
        """Update of the policy in the folder, if later than the checkpoint from which the run continues."""
        score_name = next((extension.selects_by for extension in setup.extensions if extension.selects_by), "reward")
        self.selection = PolicySelection(config.max_kl, critic_warmup, score_name, measure_of(setup))

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects by name in a checkpoint."""
        return {"drift": self.drift, "best_policy": self.selection}

    def begin(self, done: int) -> None:
        """Copy the best policy of the run that is continued, or evaluate and log the initial policy of a new run."""
        if done < self.total_updates and (line := self.selection.forget_if_changed()):
            self.drift.load_state_dict(None)
            self.setup.run.print(line)
        if self.config.save_best_policy:
            copy_best_policy(self.setup.run, self.selection)
            self.stale = self.setup.run.stale_update(done)
        if not done and self.is_due(0):
            self.setup.run.log(0, self.evaluate(0))

    def is_due(self, update: int) -> bool:
        """Return whether the policy is evaluated after an update (0 is before the first)."""
        return bool(self.setup.validation) and (update % self.config.eval_steps == 0 or update == self.total_updates)

    @torch.no_grad()
    def evaluate(self, update: int) -> dict[str, float]:
        """Evaluate the policy with the same noise each time, keep it if it is the best, and return metrics."""
        setup, run, config = self.setup, self.setup.run, self.config
        with setup.averaged_weights():
            key = (run.config.seed, RngStream.VALIDATION_SAMPLES)
            rollout = sample_rollout(setup.sampler, setup.policy.tokenization, setup.validation, setup.sampling, key)
            with save_if_scoring_fails(run, rollout, update):
                evaluation = self._score(update, rollout)
            scores = evaluation.final_scores
            metrics = mean_and_error("reward", scores) | {"kl": evaluation.kl, "kl_per_token": evaluation.kl_per_token}
            metrics |= response_metrics(rollout) | evaluation.metrics
            for warning in self.drift.check(metrics):
                run.print(f"warning: reward rose, but {warning}: read the samples before trusting it")
            for line in evaluation.messages:
                run.print(line)
            run.record("samples", sample_rows(evaluation, scores), update)
            chosen = scores if evaluation.selection_scores is None else evaluation.selection_scores
            candidate = Candidate(update, chosen.tolist())
            if self.stale and update >= self.stale:  # the best policy was replaced by a policy that was lost
                self.selection.best, self.stale = None, 0
            if self.selection.update(candidate, metrics["kl"]) and config.save_best_policy:
                save_policy(setup, self.folder, metrics)
                metrics["is_best"], self.stale = 1.0, 0
        return {f"validation/{name}": value for name, value in metrics.items()}

    def _score(self, update: int, rollout: Rollout) -> PolicyEvaluation:
        """Return the rewards of a rollout and its KL to the reference, after the changes of extensions."""
        setup, run = self.setup, self.setup.run
        scores = setup.rewards(rollout)
        outputs = forward_all_roles(
            setup.roles,
            rollout,
            minibatches=[list(range(len(rollout)))],
            backbone=setup.policy.backbone,
            temperature=setup.sampling.temperature,
            micro_batch_tokens=run.optimization.micro_batch_tokens,
            accelerator=run.accelerator,
        )
        kl = (outputs.log_probs - outputs.ref_log_probs).sum()
        evaluation = PolicyEvaluation(
            update=update,
            rollout=rollout,
            scores=scores.total,
            missing_eos=setup.missing_eos,
            kl=float(kl / len(rollout)),
            kl_per_token=float(kl / rollout.lengths.sum()),
        )
        for extension in setup.extensions:
            extension.evaluate(evaluation)
        return evaluation

    @contextmanager
    def naming_kept_policy(self) -> Iterator[None]:
        """Add the kept policy to the message of an error."""
        try:
            yield
        except UserError as error:
            best = self.selection.best if self.config.save_best_policy else None
            kept = f"{self.folder} holds the policy of update {best.update}" if best else "no policy was saved"
            raise UserError(f"{error}; {kept}, and the initial policy is {self.setup.run.model_config.model}") from error

    def finish(self) -> Path:
        """Save the last policy, unless an evaluation has selected one; return the folder of the kept policy."""
        run = self.setup.run
        # The folder may be from an earlier run. On a shared disk, some processes may not see it.
        has_best = self.selection.best is not None and run_on_main(self.folder.exists, run.accelerator)
        has_best = has_best and not self.stale
        if self.config.save_best_policy:
            run.print(self.selection.warning() if has_best else "no evaluation chose a best policy; the last one is kept")
        if not (self.config.save_best_policy and has_best):
            with self.setup.averaged_weights():
                save_policy(self.setup, self.folder, {})
        return self.folder


def save_policy(setup: PPOSetup, folder: Path, metrics: dict[str, float], write: WriteModel = save_model) -> None:
    """Save the current policy as a folder that other programs load."""
    state = setup.engine.model_state()
    card = setup.run.card("Policy trained by PPO", metrics=metrics, **setup.card)
    weights = weights_of(setup.policy.backbone, state)
    stop_ids = setup.sampling.stop_ids or frozenset()
    run_on_main(lambda: write(folder, setup.policy, weights, card, stop_ids=stop_ids), setup.run.accelerator)
