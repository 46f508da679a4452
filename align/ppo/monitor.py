"""The bookkeeping of PPO updates beyond `Monitor`: metrics of rollouts and optimizer steps, FLOPs and watches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from align.ppo.config import PPOConfig
from align.ppo.flops import phase_flops, rollout_lengths
from align.ppo.metrics import CollapseWatch, MissingEosWatch, NegativeKLWatch, check_ratio, response_kl, rollout_metrics
from align.ppo.records import Experience, Rollout
from align.ppo.rollout_files import RolloutRecorder
from align.ppo.setup import PPOSetup
from align.training.checkpoint.checkpoint import Stateful
from align.training.engine import NotFiniteError
from align.training.monitor import Monitor, stop_on_nan


class PPOMonitor(Monitor):
    """Collects the metrics of an update, and stops the run or warns if training goes wrong.

        with monitor.update_of(update):
            monitor.lap("sample"), monitor.lap("score")
            monitor.add_experience(update, experience)
            with monitor.optimizer_step(rollout, minibatch): ...
            monitor.add_step(metrics)
        monitor.log_update(update)

    Attributes:
        negative_kl: stops a run whose KL to the reference stays negative.
        collapse: warns of a collapse of the policy, and stops the run.
        missing_eos: warns if responses without EOS are rewarded. Its state is not saved, so a resumed run may warn again.
    """

    def __init__(self, config: PPOConfig, setup: PPOSetup) -> None:
        super().__init__(setup.run)
        self.config, self.setup = config, setup
        self.negative_kl = NegativeKLWatch()
        self.collapse = CollapseWatch(stops=config.stop_on_collapse)
        self.missing_eos = MissingEosWatch(config.missing_eos_score)
        self.recorder = RolloutRecorder(setup.run, setup.policy.tokenization, config.total_updates)
        self.steps: list[dict[str, float]] = []
        """Metrics of the optimizer steps of the update that train the policy."""

    def stateful(self) -> dict[str, Stateful]:
        """Return the stateful objects by name in a checkpoint."""
        return {"negative_kl": self.negative_kl, "collapse": self.collapse}

    def begin(self, done: int) -> None:
        """Remove the rollouts that a killed run wrote after update `done`. The run's folder is already locked."""
        self.recorder.remove_after(done)

    @contextmanager
    def update_of(self, update: int) -> Iterator[None]:
        """Start the row, the clock and the steps of an update, which runs in this context. Add its costs on exit."""
        self.steps = []
        with self.update(update, list):
            yield
            self._add_costs()
        self.negative_kl.check(response_kl(self.experience))

    def add_experience(self, update: int, experience: Experience) -> None:
        """Record a rollout and add its metrics. Call it before the policy is trained on the rollout."""
        config, setup = self.config, self.setup
        self.experience = experience
        self.run.print(self.missing_eos.check(experience.signal.scores, experience.rollout.ended_mask))
        self.lengths = rollout_lengths(experience.rollout, setup.policy.backbone, config.micro_batch_tokens)
        self.recorder.write(update, experience)
        self.lap("record")
        self.add(rollout_metrics(experience, config.kl_estimator if config.kl_in == "reward" else None))

    @contextmanager
    def optimizer_step(self, rollout: Rollout, minibatch: Sequence[int]) -> Iterator[None]:
        """Save the responses of the minibatch and raise a UserError if a loss or gradient in this context is not finite."""
        try:
            yield
        except NotFiniteError as error:
            rows = [{"row": row, "response": rollout.texts[row]} for row in minibatch]
            stop_on_nan(self.run, self.run.update, error, rows)

    def check_first_minibatch(self, metrics: Mapping[str, float]) -> None:
        """Check that the ratio at the first minibatch of a fresh rollout is 1; see `check_ratio`."""
        self.run.print(check_ratio(metrics["ratio/abs_error"], self.run.accelerator.device))

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an optimizer step that trains the policy. The row has their means over steps."""
        self.steps.append(dict(metrics))

    def log_update(self, update: int) -> None:
        """Log the row, and print the warnings of `collapse`.

        Raises:
            UserError: if the policy has collapsed.
        """
        self.log(update, f"reward {self.row['reward/mean']:.3f}, KL {self.row['kl/k1']:.2f}")
        for warning in self.collapse.check(self.row, self.experience.scores, self.config.samples_per_prompt):
            self.run.print(warning)

    def _add_costs(self) -> None:
        """Add means over optimizer steps, the metrics of extensions, and the time, FLOPs and MFU of the update."""
        config, setup, tokens = self.config, self.setup, float(self.experience.lengths.sum())
        values: dict[str, list[float]] = {}
        for step in self.steps:
            for name, value in step.items():
                values.setdefault("loss/total" if name == "loss" else name, []).append(value)
        self.add({name: sum(column) / len(column) for name, column in values.items()})
        epochs = len(self.steps) / config.num_mini_batches
        self.add({"policy/epochs": epochs} | setup.extensions.metrics())
        critic_epochs = (config.epochs if setup.roles.trains_critic else epochs) - epochs
        phases = phase_flops(setup.flops_profiles, self.lengths, epochs, critic_epochs)
        extra = setup.extensions.flops(self.lengths)
        self.add_speed(tokens, sum(phases.values()) + extra)
        self.add({"speed/mfu_learn": self.mfu(phases["learning"] + extra, self.clock.seconds["learn"])})
