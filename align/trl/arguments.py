"""Arguments of the trainer: checks, conversion to this library's settings, and settings without an effect."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SaveStrategy

import align.ppo.config as core
from align.core.errors import UserError, short_repr
from align.ppo.inputs import BASE_REFERENCE, sharing_pair
from align.training.model_source import ModelSource
from align.trl.config import InvalidArgumentError, PPOConfig
from align.trl.value_head import PreTrainedModelWrapper

RUN_FOLDER = "align"
"""Run folder inside `output_dir`."""
SMALLEST = 1e-30
"""Replaces 0, which the core does not accept. The trainer's scheduler sets the learning rate of each step."""
SAME = (
    *("seed", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "temperature", "gamma", "lam"),
    *("num_ppo_epochs", "num_mini_batches", "kl_coef", "kl_estimator", "cliprange", "vf_coef", "whiten_rewards"),
)
"""Settings with the same name in the core."""


def problems(
    args: PPOConfig, models: Mapping[str, Any], train_dataset: Any, peft_config: Any, callbacks: Sequence[Any]
) -> Iterator[str]:
    """Yield a line for each argument that is invalid or excluded by another.

    Use only the first line, because each check assumes that the earlier ones have passed.

    Args:
        args: settings of the trainer.
        models: models by argument name. `model` is the policy.
        train_dataset: prompts.
        peft_config: configuration of a new adapter.
        callbacks: callbacks of the trainer.
    """
    if not isinstance(args, PPOConfig):
        yield f"`args` must be an `align.trl.PPOConfig`, not {type(args).__name__}"
    for name, kinds in (("model", PreTrainedModel | PeftModel | PreTrainedModelWrapper), ("value_model", nn.Module)):
        if not isinstance(models[name], kinds):
            yield f"`{name}` must be a loaded model of transformers, not {short_repr(models[name])}"
    if train_dataset is None:
        yield "`train_dataset` is required"
    if isinstance(train_dataset, DatasetDict):
        names, first = ", ".join(train_dataset), next(iter(train_dataset))
        yield f"`train_dataset` is a `DatasetDict` of {names}: give one of them, such as train_dataset[{first!r}]"
    if isinstance(train_dataset, IterableDataset):
        advice = "give a `Dataset`, such as Dataset.from_list(list(train_dataset))"
        yield f"`train_dataset` is an `IterableDataset`, which has no length: {advice}"
    for name in ("model", "ref_model"):
        if isinstance(models[name], PreTrainedModelWrapper):
            advice = "give its `pretrained_model`; a second one, whose weights it does not share, can be the `value_model`"
            yield f"`{name}` is an {type(models[name]).__name__}: {advice}"
    model, ref_model = models["model"], models["ref_model"]
    has_adapter = isinstance(model, PeftModel) or peft_config is not None
    if not has_adapter and not all(weight.is_floating_point() for weight in model.parameters()):
        yield "`model` is quantized, so its weights cannot be trained: give a `peft_config`"
    if ref_model is model:
        yield "`model` and `ref_model` cannot be the same object: give a copy, or None for a copy of the initial policy"
    if pair := sharing_pair(list(models.items()), trained=("model", "value_model")):
        advice = "give a copy of one, copy.deepcopy(model)"
        if pair == ("model", "value_model"):
            advice += ", or train a value head on the policy by align.ppo.PPOTrainer with critic 'shared'"
        yield f"`{pair[0]}` and `{pair[1]}` share weights, which training changes: {advice}"
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        yield f"`peft_config` must be a `peft.PeftConfig`, not {type(peft_config).__name__}"
    if peft_config is not None and isinstance(model, PeftModel):
        advice = "leave `peft_config` out to train the adapter that is there, or merge it first by merge_and_unload()"
        yield f"You passed a `PeftModel` together with a `peft_config`: {advice}"
    if args.ref_adapter_name and ref_model is not None:
        yield "`ref_adapter_name` and `ref_model` both name a reference: leave one out"
    for name in ("model_adapter_name", "ref_adapter_name"):
        adapter = getattr(args, name)
        if adapter and not isinstance(model, PeftModel):
            yield f"`{name}` is {adapter!r}, but `model` is no `PeftModel`: load it as one, or leave the name out"
        elif adapter and adapter not in model.peft_config:
            yield f"`{name}` is {adapter!r}, but `model` has the adapters {', '.join(model.peft_config)}"
    if any(isinstance(each, EarlyStoppingCallback) or each is EarlyStoppingCallback for each in callbacks):
        yield (
            "`callbacks`: EarlyStoppingCallback reads evaluations, which this trainer does not make; write one that sets "
            "`control.should_training_stop`, or use selection.early_stopping_patience of `align ppo`"
        )


def require_arguments(
    args: PPOConfig,
    processing_class: object,
    models: Mapping[str, Any],
    reward_model: Any,
    train_dataset: Any,
    peft_config: Any,
    callbacks: Sequence[Any],
) -> None:
    """Raise `InvalidArgumentError` for the first invalid argument of the trainer, see `problems`."""
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        kind = type(processing_class).__name__
        raise InvalidArgumentError(f"`processing_class` must be a tokenizer of transformers, not {kind}")
    found = problems(args, {**models, "reward_model": reward_model}, train_dataset, peft_config, callbacks)
    if problem := next(found, ""):
        raise InvalidArgumentError(problem)


def reads_texts(reward_model: object) -> bool:
    """Return whether a reward model reads prompts as text: a function or a folder, not a module."""
    return not isinstance(reward_model, nn.Module)


def reference_of(args: PPOConfig, policy: ModelSource, ref_model: PreTrainedModel | None) -> PreTrainedModel | str | None:
    """Return the reference: a model, an adapter name, or None for the initial policy."""
    if ref_model is not None or policy.peft_config is not None:
        return ref_model
    is_peft_model = isinstance(policy.model, PeftModel)  # the reference is the base model, as in TRL
    return args.ref_adapter_name or (BASE_REFERENCE if is_peft_model else None)


def replaced_kernels(models: Mapping[str, Any]) -> list[str]:
    """Return a line for each model loaded with an attention kernel that this library replaces."""
    configs = {name: getattr(model, "config", None) for name, model in models.items()}
    kernels = {name: getattr(config, "_attn_implementation", None) for name, config in configs.items()}
    return [
        f"attn_implementation of `{name}` is {kernel!r}, which is replaced by PyTorch's scaled dot-product attention"
        for name, kernel in kernels.items()
        if kernel and str(kernel).startswith("flash_attention")
    ]


# ---------------------------------------------------------------------------------------------------------------- settings


class EpisodesConfig(core.PPOConfig):
    """Settings of this library for TRL's trainer, which measures the length of a run in episodes."""

    length_setting = "total_episodes"


def core_config(args: PPOConfig, longest_prompt: int, stop_ids: Sequence[int]) -> core.PPOConfig:
    """Convert TRL's settings to this library's settings. Call `set_batch_sizes` first.

    The trainer's hooks apply `missing_eos_penalty` and the learning rate of each update.

    Args:
        args: settings of the trainer.
        longest_prompt: number of tokens in the longest prompt.
        stop_ids: tokens that end a response. If empty, all responses have the full length.

    Raises:
        InvalidArgumentError: If this library does not accept a value.
    """
    if args.kl_estimator not in ("k1", "k3"):
        raise InvalidArgumentError(f"`kl_estimator` is {args.kl_estimator!r}, but must be 'k1' or 'k3'")
    assert args.output_dir is not None
    assert args.num_total_batches is not None
    assert args.batch_size is not None
    save_steps = args.save_steps if args.save_strategy == "steps" and not args.save_only_model else 0
    if save_steps < 1:  # a fraction of the run
        save_steps = math.ceil(save_steps * args.num_total_batches)
    try:
        return EpisodesConfig(
            **{name: getattr(args, name) for name in SAME} | {"save_minutes": 0.0},
            output_dir=str(Path(args.output_dir) / RUN_FOLDER),
            resume_from_checkpoint=resumed_checkpoint(args),
            report_to=["none"],
            save_steps=int(save_steps),
            save_total_limit=args.save_total_limit or 0,
            chat_template="raw",
            gradient_checkpointing=bool(args.activation_checkpointing),
            learning_rate=args.learning_rate or SMALLEST,
            lr_scheduler_type="constant",
            optimizer="adafactor" if args.optim == "adafactor" else "adamw",
            collective_timeout=min(float(args.ddp_timeout), 86_400.0),  # the core allows at most a day
            total_updates=args.num_total_batches,
            rollout_batch_size=args.batch_size,
            # Same number of tokens as TRL's micro-batches, so that memory use is similar.
            micro_batch_tokens=args.per_device_train_batch_size * (longest_prompt + args.response_length),
            max_new_tokens=args.response_length,
            max_prompt_tokens=longest_prompt,
            stop_token_ids=list(stop_ids),
            ignore_eos=not stop_ids,
            cliprange_value=args.cliprange_value or SMALLEST,  # 0 would disable clipping
            missing_eos_score=None,
            critic="separate",
            value_fit="none",  # these four safeguards, which TRL lacks, would change metrics and weights
            whitening_floor=0.0,
            max_update_kl=0.0,
            stop_on_collapse=False,
            save_best_policy=False,
        )
    except UserError as error:
        raise InvalidArgumentError(
            f"{error} (docs/migrate-from-trl.md lists the setting of TRL that becomes this one)"
        ) from error


def resumed_checkpoint(args: PPOConfig) -> bool | str:
    """Return the checkpoint to resume from: True for the last one, False for none, or its path.

    `checkpoint-N` contains only weights. The state to resume from is in the run folder.
    """
    given = str(args.resume_from_checkpoint or False)
    if given.lower() in ("true", "false"):
        return given.lower() == "true"
    if (number := Path(given).name.removeprefix("checkpoint-")).isdecimal():
        return str(Path(given).parent / RUN_FOLDER / "checkpoints" / f"update-{int(number):06d}")
    return given


SCRIPT_SETTINGS = frozenset(
    ["dataset_num_proc", "sft_model_path", "reward_model_path", "do_train", "do_eval", "do_predict", "eval_strategy"]
)
"""Settings read by training scripts, not by the trainer."""
SET_BY_TRAINER = {
    *("world_size", "num_total_batches", "micro_batch_size", "local_batch_size", "batch_size", "local_mini_batch_size"),
    *("mini_batch_size", "local_rank"),
}
"""Settings that the trainer or the launcher overrides."""
ADVICE = {
    "sizes of forward passes follow from per_device_train_batch_size and free memory": (
        "local_rollout_forward_batch_size auto_find_batch_size torch_empty_cache_steps"
    ),
    "the trainer does not evaluate during training; num_sample_generations prints samples": (
        "eval_steps eval_delay eval_on_start eval_accumulation_steps prediction_loss_only "
        "eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics label_names"
    ),
    "the last policy is saved": "load_best_model_at_end metric_for_best_model greater_is_better",
    "all prompts are in memory, and batches are made without a DataLoader": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context "
        "train_sampling_strategy remove_unused_columns length_column_name"
    ),
    "DDP is not used": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend",
    "start the script by `accelerate launch --config_file` instead": "deepspeed accelerator_config parallelism_config",
    "use DeepSpeed, by `accelerate launch --config_file`": "fsdp fsdp_config",
    "computations are in the number format of the given models": "bf16_full_eval fp16_full_eval fp16 tf32",
    "PPO has no such loss": "label_smoothing_factor neftune_noise_alpha",
    "the models are not compiled": "torch_compile torch_compile_backend torch_compile_mode",
    "the models run with their own kernels": "use_liger_kernel liger_kernel_config",
    "give the trainer optimizers=(optimizer, None)": "optim_args optim_target_modules",
    "use transformers.logging.set_verbosity": "log_level log_level_replica log_on_each_node",
    "each update is logged": "logging_steps logging_strategy logging_first_step",
    "a resumed run continues exactly": "ignore_data_skip restore_callback_states_from_checkpoint",
    "a new repository is private; its page on the hub makes it public": "hub_private_repo",
    "save_model and push_to_hub upload the final model": "hub_strategy hub_always_push",
    "set total_episodes": "max_steps",
    "a GPU is used where there is one; hide it by CUDA_VISIBLE_DEVICES=''": "use_cpu",
    "sampling always uses a cache": "use_cache",
    "activations are recomputed by the non-reentrant implementation": "activation_checkpointing_kwargs",
    "losses are always divided by global token counts": "average_tokens_across_devices",
    "a NaN ends the run, and the batch is saved": "logging_nan_inf_filter",
    "metrics.jsonl of the run has the tokens per second": "include_num_input_tokens_seen",
    "a request to stop always saves a checkpoint": "enable_jit_checkpoint",
    "the first process saves": "save_on_each_node",
    "the peak of memory is always in metrics.jsonl": "skip_memory_metrics",
    "random numbers come from seed alone; set torch.use_deterministic_algorithms for kernels": "full_determinism",
    "seed also sets the order of prompts": "data_seed",
    "weights are gathered where they fit into the free memory": "ds3_gather_for_generation",
    "a broken batch is always saved": "debug",
}
"""Advice in a warning -> settings without an effect."""
UNSUPPORTED = {name: advice for advice, names in ADVICE.items() for name in names.split()}


def unsupported_settings(args: PPOConfig) -> list[str]:
    """Return a line for each setting that differs from its default and has no effect here."""
    defaults = defaults_of(type(args))
    lines = [
        f"{name} is {getattr(args, name)!r} and has no effect: {advice}"
        for name, advice in UNSUPPORTED.items()
        if _differs(args, name, defaults[name])
    ]
    if args.save_strategy not in ("no", "steps"):
        lines.append(
            f"save_strategy is {SaveStrategy(args.save_strategy).value!r} and has no effect: use 'steps' and save_steps"
        )
    if args.optim not in ("adamw_torch", "adamw_torch_fused", "adafactor"):
        lines.append(f"optim is {args.optim!r} and has no effect: AdamW is used; adafactor is the other choice")
    return lines


NEVER_CALLED = (
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
    *("get_train_dataloader", "compute_loss", "training_step", "get_decay_parameter_names", "null_ref_context", "_save"),
)
"""Methods of transformers' and TRL's trainers that `PPOTrainer` does not call during training."""


def uncalled_methods(trainer: type[Any]) -> list[str]:
    """Return a line for each method of a trainer's subclass that TRL would call and this trainer does not."""
    bases = [base for base in trainer.__mro__ if not base.__module__.startswith("align.") and base is not object]
    names = [name for name in NEVER_CALLED if any(name in vars(base) for base in bases)]
    return [
        f"{trainer.__name__}.{name} is never called; give the trainer `optimizers`, `callbacks` or `ref_model`"
        for name in names
    ]


def number_format_hint(args: PPOConfig, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return a line if `bf16` is set but the policy is in float32, which takes precedence.

    On a CPU, return the line only if `bf16` was set explicitly.
    """
    if not args.bf16 or dtype != torch.float32 or (device.type == "cpu" and not args.bf16_was_given):
        return []
    return [
        "bf16 is set, but the models are in float32 and compute in it: load them with dtype=torch.bfloat16; the optimizer "
        "keeps float32 copies of the weights"
    ]


def defaults_of(settings: type[PPOConfig]) -> dict[str, Any]:
    """Return the defaults of all settings after initialization.

    The class is not instantiated, because that would reset accelerate's state in this process.
    """
    made = {item.name: item.default_factory() for item in fields(settings) if item.default_factory is not MISSING}
    given = {item.name: item.default for item in fields(settings)} | made
    return given | {"debug": [], "accelerator_config": AcceleratorConfig()}


def _differs(args: PPOConfig, name: str, default: Any) -> bool:
    """Return whether a setting differs from its default and has no effect."""
    value = getattr(args, name)
    happens = {"logging_steps": 1, "hub_private_repo": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    if name in happens and value == happens[name]:
        return False
    if name == "use_cpu":
        return bool(value) and torch.cuda.is_available()
    if name == "eval_steps":  # set by transformers, like `dataloader_pin_memory` on a CPU
        return value not in (default, args.logging_steps)
    if name == "dataloader_pin_memory":
        return value != default and not args.use_cpu
    return bool(value != default)
