"""PPO settings with the names and defaults of TRL 1.12, and replacements for names of earlier releases."""

import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from align.core.errors import UserError
from align.runtime.distributed import deepspeed_was_launched, prepare_compiling


class InvalidArgumentError(UserError, ValueError):
    """Raised for invalid arguments of the trainer. A `ValueError`, as in TRL."""


def setting(default: Any, help: str) -> Any:
    """Declare a field with its `--help` text."""
    return field(default=default, metadata={"help": help})


class KnownSettings:
    """Rejects unknown keyword arguments with a line that names their replacement.

    This is a separate class because `inspect.signature` of a class that defines `__new__` would not show its `__init__`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters  # a subclass may add arguments
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        if not takes_any and (message := unknown_settings(kwargs, known)):
            raise InvalidArgumentError(message)
        return super().__new__(cls)


@dataclass
class PPOConfig(KnownSettings, TrainingArguments):
    """Settings of `align.trl.PPOTrainer`: all fields of `transformers.TrainingArguments` and TRL's `PPOConfig`.

    `learning_rate`, `logging_steps` and `gradient_checkpointing` have TRL's defaults. `bf16` is on unless `fp16` is set or
    the machine lacks bfloat16. docs/migrate-from-trl.md lists the corresponding setting of this library for each field.
    """

    learning_rate: float = setting(3e-6, "Peak learning rate.")
    logging_steps: float = setting(10, "Accepted for compatibility: each update is logged.")
    gradient_checkpointing: bool = setting(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = setting(  # type: ignore[assignment]
        None, "Use bfloat16. Default: on, unless fp16 is set or the machine has no bfloat16."
    )

    dataset_num_proc: int | None = setting(None, "Processes that a script uses to tokenize its data set.")
    num_mini_batches: int = setting(1, "Optimizer steps in one pass over a rollout.")
    total_episodes: int | None = setting(None, "Responses to sample in the whole run. Default: num_train_epochs passes.")
    local_rollout_forward_batch_size: int = setting(64, "Rows in one forward pass of the rollout phase.")
    num_sample_generations: int = setting(10, "Tables of sample completions that are printed during training.")
    response_length: int = setting(53, "Longest response, in tokens.")
    stop_token: Literal["eos"] | None = setting(None, "End a response at the tokenizer's EOS token; excludes stop_token_id.")
    stop_token_id: int | None = setting(None, "End a response at this token; excludes stop_token.")
    temperature: float = setting(0.7, "Sampling temperature.")
    missing_eos_penalty: float | None = setting(None, "Subtracted from the score of a response without an EOS token.")
    sft_model_path: str = setting("EleutherAI/pythia-160m", "Model that a script loads as the policy.")
    world_size: int | None = setting(None, "Number of processes; set by the trainer.")
    num_total_batches: int | None = setting(None, "Number of updates; set by the trainer.")
    micro_batch_size: int | None = setting(None, "Rows of a micro-batch over all processes; set by the trainer.")
    local_batch_size: int | None = setting(None, "Responses of an update on one process; set by the trainer.")
    batch_size: int | None = setting(None, "Responses of an update over all processes; set by the trainer.")
    local_mini_batch_size: int | None = setting(None, "Responses of an optimizer step on one process; set by the trainer.")
    mini_batch_size: int | None = setting(None, "Responses of an optimizer step over all processes; set by the trainer.")
    push_to_hub: bool = setting(False, "Upload the model to the Hugging Face Hub when it is saved.")
    reward_model_path: str = setting("EleutherAI/pythia-160m", "Model that a script loads as reward and value model.")
    model_adapter_name: str | None = setting(None, "Name of the adapter to train, if the policy has several.")
    ref_adapter_name: str | None = setting(None, "Name of the adapter that is the reference, if the policy has several.")
    num_ppo_epochs: int = setting(4, "Passes over each rollout.")
    whiten_rewards: bool = setting(False, "Scale token rewards to unit variance.")
    kl_coef: float = setting(0.05, "Coefficient of the KL penalty.")
    kl_estimator: Literal["k1", "k3"] = setting("k1", "Estimator of the KL penalty.")
    cliprange: float = setting(0.2, "Clip range of the policy's ratio.")
    vf_coef: float = setting(0.1, "Coefficient of the value loss.")
    cliprange_value: float = setting(0.2, "Clip range of values.")
    gamma: float = setting(1.0, "Discount factor.")
    lam: float = setting(0.95, "Lambda of generalized advantage estimation.")
    ds3_gather_for_generation: bool = setting(True, "Under ZeRO-3, gather the policy's weights for generation.")

    def __post_init__(self) -> None:
        if self.deepspeed:  # transformers would multiply by `world_size`, which is not set before the trainer exists
            raise InvalidArgumentError("`deepspeed`: start the script by `accelerate launch --config_file` instead")
        self.bf16_was_given = self.bf16 is not None
        if self.bf16 is None:
            self.bf16 = not self.fp16 and (bool(self.use_cpu) or is_torch_bf16_gpu_available())
        if self.activation_checkpointing is None:  # transformers 5 renamed the setting and warns about the old name
            self.activation_checkpointing = self.gradient_checkpointing
        if deepspeed_was_launched():  # transformers starts DeepSpeed before the trainer exists
            prepare_compiling()
        super().__post_init__()  # type: ignore[no-untyped-call]


def stop_token_of(args: PPOConfig, eos_token_id: int | None) -> int | None:
    """Return the id of the token that ends a response, or None if responses have the full length.

    Raises:
        InvalidArgumentError: If both stop tokens are set, `stop_token` is unknown, or the tokenizer has no EOS token.
    """
    if args.stop_token and args.stop_token_id is not None:
        raise InvalidArgumentError("You cannot set both `stop_token` and `stop_token_id`.")
    if args.stop_token is None:
        return args.stop_token_id
    if args.stop_token != "eos":
        raise InvalidArgumentError(
            f"Unknown `stop_token` {args.stop_token!r}: the valid values are 'eos' and None (no stop token)"
        )
    if eos_token_id is None:
        raise InvalidArgumentError("stop_token is 'eos', but the tokenizer has no EOS token: set stop_token_id")
    return eos_token_id


def ending_ids(stop_token_id: int | None, pad_id: int | None, rows: int) -> list[int]:
    """Return the ids of tokens that end a response: the stop token and, if the model can sample it, the padding token.

    In TRL, the first padding token masks the rest of a response, even if it is the EOS token.

    Args:
        stop_token_id: stop token, if any.
        pad_id: padding token, if any.
        rows: number of rows of the model's vocabulary matrix.
    """
    ends = (stop_token_id, pad_id if pad_id in range(rows) else None)
    return sorted({id for id in ends if id is not None})


def set_batch_sizes(args: PPOConfig, rows: int, processes: int) -> list[str]:
    """Compute the sizes of updates, minibatches and the run, and store them in `args`, as TRL does.

    Args:
        args: settings of the trainer.
        rows: number of rows in the training data.
        processes: number of processes.

    Returns:
        A line for each size that was set to a different value.

    Raises:
        InvalidArgumentError: If minibatches would differ in size.
    """
    given = {name: getattr(args, name) for name in ("batch_size", "mini_batch_size", "local_batch_size")}
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * rows)
    args.world_size = processes
    args.local_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    args.micro_batch_size = args.per_device_train_batch_size * processes
    args.batch_size = args.local_batch_size * processes
    if args.num_mini_batches < 1 or args.local_batch_size % args.num_mini_batches:
        raise InvalidArgumentError(
            f"`local_batch_size` must be a multiple of `num_mini_batches`, inexact division: {args.local_batch_size} / "
            f"{args.num_mini_batches}; local_batch_size is per_device_train_batch_size x gradient_accumulation_steps"
        )
    args.mini_batch_size = args.batch_size // args.num_mini_batches
    args.local_mini_batch_size = args.local_batch_size // args.num_mini_batches
    args.num_total_batches = math.ceil(args.total_episodes / args.batch_size)
    return [
        f"{name} is {value} and has no effect: it is {getattr(args, name)}, which follows from per_device_train_batch_size, "
        "gradient_accumulation_steps, num_mini_batches and the number of processes"
        for name, value in given.items()
        if value not in (None, getattr(args, name))
    ]


# ------------------------------------------------------------------ names of earlier releases of TRL and transformers

LOOP = "docs/migrate-from-trl.md, section 'From TRL 0.4 to 0.11'"
LEGACY = (
    "TRL 0.4 to 0.11, whose scripts sample, score and call step(). Import PPOConfig, PPOTrainer and the models with a value "
    "head from align.trl.legacy, and trl.core's LengthSampler from align.trl.legacy.core: nothing else changes. For a "
    f"trainer that samples by itself, give align.trl.PPOTrainer a reward function ({LOOP})"
)
"""End of messages about code written for TRL 0.11."""
LEGACY_SETTINGS = frozenset(
    [
        "model_name",
        "query_dataset",
        "task_name",
        "log_with",
        "tracker_kwargs",
        "tracker_project_name",
        "project_kwargs",
        "accelerator_kwargs",
        "push_to_hub_if_best_kwargs",
        "steps",
        "adap_kl_ctrl",
        "init_kl_coef",
        "kl_penalty",
        "target",
        "horizon",
        "forward_batch_size",
        "ppo_epochs",
        "optimize_cuda_cache",
        "optimize_device_cache",
        "early_stopping",
        "target_kl",
        "compare_steps",
        "ratio_threshold",
        "use_score_scaling",
        "use_score_norm",
        "score_clip",
        "backward_batch_size",
        "global_backward_batch_size",
        "global_batch_size",
        "is_encoder_decoder",
        "is_peft_model",
    ]
)
"""Settings of TRL 0.11 that TRL 1.12 does not have."""
LEGACY_NAMES = frozenset(
    ["AdaptiveKLController", "FixedKLController", "create_reference_model", "set_seed", "LengthSampler", "respond_to_batch"]
)
"""Names imported by scripts for TRL 0.11."""

SETTINGS = {
    "exp_name": "leave it out",
    "non_eos_penalty": "missing_eos_penalty",
    "penalty_reward_value": "missing_eos_penalty",
    "truncate_token": "stop_token",
    "truncate_token_id": "stop_token_id",
    "warmup_ratio": "warmup_steps; a value below 1 is a share of all steps",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "leave it out; a folder with an earlier run is refused",
    "no_cuda": "use_cpu",
    "save_safetensors": "leave it out; weights are always saved as safetensors",
    "evaluation_strategy": "eval_strategy",
    "tokenizer": "give the tokenizer to PPOTrainer as processing_class",
}
"""Settings missing from `align.trl.PPOConfig` -> replacement."""

ARGUMENTS = {
    "config": "args",
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "policy": "model",
    "ref_policy": "ref_model",
    "optimizer": "optimizers=(optimizer, None)",
    "lr_scheduler": "optimizers=(None, lr_scheduler)",
}
"""Earlier names of `PPOTrainer` arguments -> current name."""

MEMBERS = {
    "step": f"call train(), which samples, scores and learns; align.trl.legacy has step() ({LOOP})",
    "generate": "train() samples; generate_completions() prints samples of the evaluation prompts",
    "log_stats": "log(metrics)",
    "evaluate": "the trainer does not evaluate; generate_completions() prints samples of the evaluation prompts",
    "predict": "generate_completions() prints samples of the evaluation prompts",
    "log_metrics": "train() returns no metrics; they are in state.log_history",
    "save_metrics": "train() returns no metrics; save_state() writes state.log_history to trainer_state.json",
}
"""Members of TRL's `PPOTrainer` (0.11 or 1.12) that are missing here -> advice."""


def unknown_settings(given: Collection[str], known: Collection[str]) -> str:
    """Return the message for keyword arguments that are not settings, or "" if there are none."""
    if legacy := [name for name in given if name in LEGACY_SETTINGS and name not in known]:
        return f"{', '.join(f'`{name}`' for name in legacy)}: settings of {LEGACY}"
    return "; ".join(f"`{name}` is no setting{_instead(name, SETTINGS)}" for name in given if name not in known)


def renamed_arguments(given: Collection[str]) -> str:
    """Return the message for arguments with earlier names, or "" if there are none."""
    renamed = [f"`{name}`{_instead(name, ARGUMENTS)}" for name in given if name in ARGUMENTS]
    return f"PPOTrainer has other names for some arguments: {'; '.join(renamed)} ({LOOP})" if renamed else ""


def legacy_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message for a call in the style of TRL 0.11, or "" for other calls.

    Args:
        args: positional arguments of the trainer.
        kwargs: keyword arguments of the trainer.
    """
    names = [name for name in ("dataset", "num_shared_layers", "training_data_collator") if name in kwargs]
    has_tokenizer = any(isinstance(value, PreTrainedTokenizerBase) for value in args[2:])
    is_early = {"config", "tokenizer"} & kwargs.keys() and not {
        "reward_model",
        "value_model",
        "train_dataset",
    } & kwargs.keys()
    if not (names or has_tokenizer or is_early):
        return ""
    return f"PPOTrainer(config, model, ref_model, tokenizer, dataset) is a call of {LEGACY}"


def _instead(name: str, table: dict[str, str]) -> str:
    """Return the end of a message that names the replacement, or "" if there is none."""
    if name not in table:
        return ""
    here = table[name]
    return f": use `{here}`" if re.fullmatch(r"\w+", here) else f": {here}"
