"""PPO settings with the names and defaults of TRL 0.11."""

import importlib.util
import inspect
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from align.trl.config import InvalidArgumentError, setting

LATER = {
    "num_ppo_epochs": "ppo_epochs",
    "kl_coef": "init_kl_coef",
    "kl_estimator": "kl_penalty",
    "total_episodes": "steps",
    "report_to": "log_with",
    "per_device_train_batch_size": "mini_batch_size",
    "response_length": "a generation argument, max_new_tokens",
    "temperature": "a generation argument",
    "output_dir": "trainer.save_pretrained(folder)",
    "missing_eos_penalty": "subtract it from the scores",
    "stop_token": "a generation argument, eos_token_id",
}
"""Settings of TRL 0.12 and later -> replacement in this API."""
UNUSED = ("accelerator_kwargs", "optimize_device_cache", "optimize_cuda_cache", "dataset_num_proc")
"""Settings without an effect. `exp_name` and others only describe a run."""


class KnownSettings:
    """Rejects keyword arguments that are not settings of TRL 0.11."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        if unknown := [name for name in kwargs if name not in known and not takes_any]:
            places = (f"`{name}`: {LATER[name]}" if name in LATER else f"`{name}`" for name in unknown)
            raise InvalidArgumentError(
                f"not settings of TRL 0.11: {'; '.join(places)}. align.trl.PPOConfig has the settings of TRL 0.12 to 1.12"
            )
        return super().__new__(cls)


@dataclass
class PPOConfig(KnownSettings):
    """Settings of `align.trl.legacy.PPOTrainer`.

    Raises:
        InvalidArgumentError: If a value is invalid, or an argument is not a setting.
    """

    exp_name: str = setting("align", "Name of the experiment. Only for trackers.")
    seed: int = setting(0, "Seed of the random numbers.")
    log_with: Literal["wandb", "tensorboard"] | None = setting(None, "Tracker of log_stats.")
    task_name: str | None = setting(None, "Name of the task. Only for trackers.")
    model_name: str = setting("gpt2", "Name of the model. Only for trackers; scripts load it.")
    query_dataset: str = setting("stanfordnlp/imdb", "Name of the data. Only for trackers; scripts load it.")
    reward_model: str = setting("sentiment-analysis:lvwerra/distilbert-imdb", "Name of the reward model. For trackers.")
    remove_unused_columns: bool = setting(True, "Remove columns of the data set that the model does not take.")
    tracker_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the tracker."})
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "No effect: the launcher decides."})
    project_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "`logging_dir` of the tracker."})
    tracker_project_name: str = setting("trl", "Project of the tracker.")
    push_to_hub_if_best_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Upload the best model with these arguments of push_to_hub."}
    )
    steps: int = setting(20000, "Number of responses of the run. Read by scripts.")
    learning_rate: float = setting(1.41e-5, "Learning rate of Adam.")
    adap_kl_ctrl: bool = setting(True, "Adapt the KL coefficient to `target`.")
    init_kl_coef: float = setting(0.2, "KL coefficient, or its first value.")
    kl_penalty: Literal["kl", "abs", "mse", "full"] = setting("kl", "Estimator of the KL penalty of each token.")
    target: float = setting(6.0, "Target KL of the adaptive coefficient, in nats per response.")
    horizon: float = setting(10000.0, "Responses over which the coefficient adapts.")
    gamma: float = setting(1.0, "Discount factor.")
    lam: float = setting(0.95, "Lambda of generalized advantage estimation.")
    cliprange: float = setting(0.2, "Clip range of the policy's ratio.")
    cliprange_value: float = setting(0.2, "Clip range of values.")
    vf_coef: float = setting(0.1, "Coefficient of the value loss.")
    batch_size: int = setting(128, "Responses of one step on each process.")
    forward_batch_size: int | None = setting(None, "Earlier name of mini_batch_size.")
    mini_batch_size: int = setting(128, "Responses of a forward pass on each process.")
    gradient_accumulation_steps: int = setting(1, "Forward passes of an optimizer step.")
    world_size: int | None = setting(None, "Number of processes; set by the trainer.")
    ppo_epochs: int = setting(4, "Passes over the responses of a step.")
    max_grad_norm: float | None = setting(None, "Largest norm of the gradient.")
    optimize_cuda_cache: bool | None = setting(None, "No effect.")
    optimize_device_cache: bool = setting(False, "No effect.")
    early_stopping: bool = setting(False, "End a step's epochs when the KL to the old policy exceeds 1.5 * target_kl.")
    target_kl: float = setting(1.0, "See early_stopping; in nats per token.")
    compare_steps: int = setting(1, "Steps between comparisons for push_to_hub_if_best_kwargs.")
    ratio_threshold: float = setting(10.0, "Mean ratio above which a minibatch is skipped.")
    use_score_scaling: bool = setting(False, "Divide scores by their running standard deviation.")
    use_score_norm: bool = setting(False, "Subtract the running mean of scores, too. Needs use_score_scaling.")
    score_clip: float | None = setting(None, "Largest absolute score.")
    whiten_rewards: bool = setting(False, "Scale token rewards to unit variance.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    is_encoder_decoder: bool | None = setting(None, "Set by the trainer.")
    is_peft_model: bool | None = setting(None, "Set by the trainer.")
    backward_batch_size: int | None = setting(None, "Responses of an optimizer step on each process; computed.")
    global_backward_batch_size: int | None = setting(None, "The same over all processes; set by the trainer.")
    global_batch_size: int | None = setting(None, "Responses of one step over all processes; set by the trainer.")
    dataset_num_proc: int | None = setting(None, "Read by scripts.")

    def __post_init__(self) -> None:
        self.mini_batch_size = self.forward_batch_size or self.mini_batch_size
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.backward_batch_size < 1 or self.batch_size % self.backward_batch_size:
            raise InvalidArgumentError(
                "`batch_size` must be a multiple of `mini_batch_size * gradient_accumulation_steps`, inexact division: "
                f"{self.batch_size} / {self.backward_batch_size}"
            )
        if self.kl_penalty not in ("kl", "abs", "mse", "full"):
            raise InvalidArgumentError(f"`kl_penalty` is {self.kl_penalty!r}, but must be 'kl', 'abs', 'mse' or 'full'")
        if self.log_with == "wandb" and importlib.util.find_spec("wandb") is None:
            raise InvalidArgumentError("log_with is 'wandb', which is not installed: pip install wandb")
        if self.push_to_hub_if_best_kwargs and "repo_id" not in self.push_to_hub_if_best_kwargs:
            raise InvalidArgumentError("`push_to_hub_if_best_kwargs` needs a repo_id")
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a flat dictionary. Keys of nested dictionaries are joined with slashes."""
        return _flat(asdict(self))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def unused_settings(config: PPOConfig) -> list[str]:
    """Return a line for each setting that differs from its default and has no effect."""
    defaults = {item.name: item.default for item in fields(config)} | {"accelerator_kwargs": {}}
    return [
        f"{name} is {getattr(config, name)!r} and has no effect; `accelerate launch` and its config file choose the devices"
        for name in UNUSED
        if getattr(config, name) != defaults[name] and name != "dataset_num_proc"
    ]
