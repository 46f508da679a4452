"""TRL's `PPOTrainer`, implemented with this library's PPO."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from huggingface_hub import ModelCard
from peft import PeftConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import PrinterCallback, TrainerControl
from transformers.trainer_utils import rotate_checkpoints

from align.batches.mixtures import data_name
from align.models.checkpoint import make_repo, model_card, push_model, save_model_into
from align.models.vocabulary import vocabulary_rows
from align.ppo.evaluation import save_policy
from align.ppo.extensions.active import Extensions
from align.ppo.inputs import CalledCritic, PPOInputs
from align.ppo.reward_functions import RewardFunction
from align.ppo.setup import prepare
from align.ppo.train import train
from align.ppo.trainer import reward_settings
from align.runtime.distributed import run_on_main
from align.training.callbacks import STATE_FILE
from align.training.model_source import ModelSource
from align.trl.arguments import (
    core_config,
    number_format_hint,
    reads_texts,
    reference_of,
    replaced_kernels,
    require_arguments,
    uncalled_methods,
    unsupported_settings,
)
from align.trl.config import (
    MEMBERS,
    InvalidArgumentError,
    PPOConfig,
    ending_ids,
    legacy_arguments,
    renamed_arguments,
    set_batch_sizes,
    stop_token_of,
)
from align.trl.hooks import TrainerHooks, TRLCallbacks, end_processes_at_exit, require_own_loop, show_completions
from align.trl.modules import called_critic, require_whole_weights, rewards_of
from align.trl.prompts import PromptReader, check_context, data_sets
from align.trl.value_head import PolicyAndValueModel, PreTrainedModelWrapper


class KnownArguments:
    """Rejects argument names of earlier releases, unless a subclass defines these arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        require_own_loop(cls, PPOTrainer)
        inherited: Any = cls.__init__
        message = legacy_arguments(args, kwargs) or renamed_arguments(kwargs)
        if inherited is PPOTrainer.__init__ and message:
            raise InvalidArgumentError(message)
        return super().__new__(cls)


class PPOTrainer(KnownArguments):
    """PPO trainer with the arguments, attributes and files of TRL 1.12. docs/migrate-from-trl.md lists the differences.

    The models are trained in place.

    Args:
        args: settings.
        processing_class: tokenizer of the policy.
        model: policy. A causal language model, a T5, or a `PeftModel`, whose active adapter is trained.
        ref_model: reference of the KL penalty. Default: a copy of the policy, or with LoRA the policy without its adapter.
        reward_model: sequence classifier with one label that reads the policy's token ids, or a module with
            `base_model_prefix` and `score`. Unlike TRL, also the folder of a reward model, a reward function of prompts,
            responses and data columns (docs/howto/own-reward.md), or a list of these.
        train_dataset: prompts, with token ids in the column `input_ids`.
        value_model: model that predicts returns. A sequence classifier with one label, a module with `base_model_prefix` and
            `score`, or a language model with a value head, such as `AutoModelForSeq2SeqLMWithValueHead` for a T5.
        data_collator: collator to call on each row separately, if any.
        eval_dataset: prompts of the tables of sample completions. A dict of data sets is treated as one.
        optimizers: optimizer and learning rate scheduler. Default: those selected by the settings.
        callbacks: callbacks to use in addition to those of `args.report_to`.
        peft_config: configuration of a new adapter to train instead of all weights of the policy.

    Raises:
        InvalidArgumentError: If arguments are invalid or exclude each other.
        UserError: If a model or the data cannot be used.
    """

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None,
        reward_model: nn.Module | RewardFunction | str | list[Any],
        train_dataset: Dataset,
        value_model: PreTrainedModel | PreTrainedModelWrapper,
        data_collator: DataCollatorWithPadding | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: PeftConfig | None = None,
    ) -> None:
        models = {"model": model, "ref_model": ref_model, "value_model": value_model}
        require_arguments(args, processing_class, models, reward_model, train_dataset, peft_config, callbacks or [])
        self.args, self.processing_class, self.ref_model, self.reward_model = args, processing_class, ref_model, reward_model
        self.train_dataset, self.eval_dataset, self.train_dataset_len = train_dataset, eval_dataset, len(train_dataset)
        self.data_collator = data_collator or DataCollatorWithPadding(processing_class)
        self.stop_token_id = stop_token_of(args, processing_class.eos_token_id)
        notes = [
            *set_batch_sizes(args, self.train_dataset_len, int(os.environ.get("WORLD_SIZE", "1"))),
            *unsupported_settings(args),
            *uncalled_methods(type(self)),
            *replaced_kernels({**models, "reward_model": reward_model}),
        ]
        reader = PromptReader(processing_class, data_collator, with_turns=reads_texts(reward_model))
        prompts = reader.rows(train_dataset)
        check_context(prompts, models, args.response_length)
        self.hooks = TrainerHooks(args, processing_class.eos_token_id, *optimizers)
        self._start_callbacks(callbacks or [])
        self._prepare_run(ModelSource(model, processing_class, peft_config), prompts, value_model)
        self._expose_models(model, value_model)
        self.eval_prompts = reader.encoded(eval_dataset, self.setup.policy, args.response_length)
        self.hub_model_id: str | None = None
        if args.push_to_hub:
            self.hub_model_id = run_on_main(lambda: make_repo(self._repository(), args.hub_token), self.accelerator)
        for line in [*notes, *reader.hints(prompts), *number_format_hint(args, model.dtype, self.accelerator.device)]:
            self.setup.run.print(f"warning: {line}")

    # ------------------------------------------------------------------------------------------------- the constructor

    def _start_callbacks(self, callbacks: Sequence[TrainerCallback | type[TrainerCallback]]) -> None:
        """Create the handler of the given callbacks and those of `args.report_to`. Requires `args` and `hooks`."""
        reporters = get_reporting_integration_callbacks(self.args.report_to)
        self.callbacks = TRLCallbacks([*reporters, *callbacks, PrinterCallback], self)
        self.state, self.callback_handler = self.callbacks.state, self.callbacks.handler

    def _prepare_run(
        self, policy: ModelSource, prompts: list[dict[str, Any]], value_model: PreTrainedModel | PreTrainedModelWrapper
    ) -> None:
        """Create the settings and objects of the core (`core_config`, `setup`) for the given models."""
        args, model = self.args, cast(PreTrainedModel | PeftModel, policy.model)
        pad_id = self.processing_class.pad_token_id
        models, functions, extensions = rewards_of(self.reward_model, pad_id, args.per_device_train_batch_size)
        ends = ending_ids(self.stop_token_id, pad_id, vocabulary_rows(cast(Any, model)))
        config = core_config(args, max(len(row["input_ids"]) for row in prompts), ends)
        self.core_config = replace(config, prompts=data_name(prompts), **reward_settings(models, functions))
        # transformers' settings have initialized accelerate's state. With DeepSpeed on CPUs, it has a single process.
        AcceleratorState._reset_state(reset_partial_state=True)
        if isinstance(model, PeftModel) and args.model_adapter_name:
            model.set_adapter(args.model_adapter_name)
        inputs = PPOInputs(
            policy=policy,
            reward_models=models,
            functions=functions,
            extensions=Extensions([self.hooks, *extensions]),
            prompts=prompts,
            reference=reference_of(args, policy, self.ref_model),
            value_model=called_critic(value_model) or value_model,
            callbacks=self.callbacks,
        )
        self.setup = prepare(self.core_config, inputs)
        # Prompts are token ids, so no chat template is applied. The policy is saved with its tokenizer's template.
        self.setup.policy.tokenization.tokenizer.chat_template = self.processing_class.chat_template
        if isinstance(inputs.value_model, CalledCritic):
            require_whole_weights(self.setup.run.accelerator, "value_model")
        end_processes_at_exit()

    def _expose_models(self, model: PreTrainedModel | PeftModel, value_model: nn.Module) -> None:
        """Set the attributes that TRL's trainer has after preparing its models."""
        self.accelerator = self.setup.run.accelerator
        self.optimizer, self.lr_scheduler = self.hooks.optimizer, self.hooks.lr_scheduler
        self.model = PolicyAndValueModel(self.setup.policy.backbone.peft or model, value_model)
        self.policy_model, self.value_model = self.model.policy, self.model.value_model
        self.is_peft_model = isinstance(self.policy_model, PeftModel)
        handler = self.callback_handler
        handler.model, handler.lr_scheduler, handler.processing_class = self.model, self.lr_scheduler, self.processing_class
        if self.ref_model is None and (copied := self.setup.roles.reference_model) is not None:
            self.ref_model = copied.backbone.model
        self.model_adapter_name, self.ref_adapter_name = self.args.model_adapter_name, self.args.ref_adapter_name
        self.is_deepspeed_enabled, self.is_fsdp_enabled = self.accelerator.state.deepspeed_plugin is not None, False
        self.local_dataloader_batch_size = self.args.local_batch_size
        self.local_seed = self.args.seed + self.accelerator.process_index * 100003
        tables = self.args.num_sample_generations
        self.sample_generations_freq = max(1, (self.args.num_total_batches or 1) // tables) if tables > 0 else 0
        self.callbacks.require_unchanged()

    # ------------------------------------------------------------------------------------------------------- training

    def train(self) -> None:
        """Run all updates, or resume from a checkpoint if `args.resume_from_checkpoint` is set.

        Raises:
            UserError: If `train` has already been called.
        """
        with self.setup:
            train(self.core_config, self.setup)

    def generate_completions(self, sampling: bool = False) -> None:
        """Print a table of completions of the evaluation prompts with their scores. Without prompts, do nothing.

        Args:
            sampling: whether to complete only one batch of prompts.
        """
        if not self.eval_prompts:
            return
        at_once = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        prompts = self.eval_prompts[:at_once] if sampling else self.eval_prompts
        show_completions(self.setup, prompts, self.args.seed, "wandb" in (self.args.report_to or ()))

    # --------------------------------------------------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy and its tokenizer, and upload them if `args.push_to_hub` is set.

        Args:
            output_dir: target folder, whose other files are kept. Default: `args.output_dir`.
            _internal_call: whether to save a checkpoint, which is not uploaded.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        names = self._save_policy(folder)
        run_on_main(lambda: self.state.save_to_json(str(folder / STATE_FILE)), self.accelerator)
        if self.args.push_to_hub and not _internal_call:
            self._upload(folder, names, "Model save")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Save the policy in `args.output_dir` and upload its files. Return the URL of the repository.

        Args:
            commit_message: message of the commit.
            blocking: accepted for compatibility. The upload always blocks.
            token: access token. Default: `args.hub_token`.
            revision: branch. Default: `args.hub_revision`.
            kwargs: arguments of `create_model_card`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = Path(str(self.args.output_dir))
        names = self._save_policy(folder)
        self.create_model_card(**kwargs)
        return self._upload(folder, names, commit_message, token, revision)

    def _save_policy(self, folder: Path) -> set[str]:
        """Save the policy to a folder. Return the names of its files on the first process, and no names on the others."""
        names: set[str] = set()

        def write(*values: Any, **named: Any) -> None:
            names.update(save_model_into(*values, **named))

        save_policy(self.setup, folder, {}, write)
        return names

    def _repository(self) -> str:
        return self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name

    def _upload(
        self, folder: Path, names: set[str], message: str, token: str | None = None, revision: str | None = None
    ) -> str:
        """Upload only the files of the policy, because other files in the folder belong to the user."""
        args = self.args
        target = (self.hub_model_id or self._repository(), message, token or args.hub_token, revision or args.hub_revision)
        return run_on_main(lambda: push_model(folder, *target, names=names), self.accelerator)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card (README.md) to `args.output_dir`.

        Args:
            model_name: title of the card. Default: the name of the folder.
            dataset_name: name of the data set with the prompts.
            tags: additional tags for the Hub.
        """
        rows = {"title": model_name or Path(str(self.args.output_dir)).name}
        rows |= {"data": dataset_name} if dataset_name else {}
        more = [tags] if isinstance(tags, str) else tags or []
        folder = Path(str(self.args.output_dir))

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            card = ModelCard(model_card({"stage": "ppo", **rows}, self.setup.policy), ignore_metadata_errors=True)
            card.data["tags"] = [*(card.data.get("tags") or []), *more]
            card.save(folder / "README.md")

        run_on_main(write, self.accelerator)

    def save_state(self) -> None:
        """Write the counters and the metric history to trainer_state.json in `args.output_dir`."""
        path = Path(str(self.args.output_dir)) / STATE_FILE
        run_on_main(lambda: self.state.save_to_json(str(path)), self.accelerator)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write `checkpoint-N`, and delete the oldest checkpoints beyond `save_total_limit`.

        The state to resume from is in the run folder. The arguments are unused. They match transformers, for subclasses that
        override the method.
        """
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        self.save_model(str(folder), _internal_call=True)
        rotate = (str(self.args.output_dir), self.args.save_total_limit)
        run_on_main(lambda: rotate_checkpoints(*rotate), self.accelerator)

    # ------------------------------------------------------------------------------------------- events and attributes

    @property
    def control(self) -> TrainerControl:
        """Control flags set by the callbacks."""
        return self.callbacks.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self.callbacks.control = control

    @property
    def dataloader(self) -> DataLoader[Any]:
        """Loader of the training prompts."""
        return self.get_train_dataloader()

    @dataloader.setter
    def dataloader(self, dataloader: object) -> None:
        raise InvalidArgumentError("`dataloader`: training draws its batches from `train_dataset`; give its rows there")

    @property
    def eval_dataloader(self) -> DataLoader[Any]:
        """Loader of the evaluation prompts."""
        return self.get_eval_dataloader()

    def __getattr__(self, name: str) -> Any:
        """Explain the replacement of members of earlier releases."""
        if name in MEMBERS:
            raise AttributeError(f"{type(self).__name__!r} has no member {name!r}: {MEMBERS[name]}")
        return self.__getattribute__(name)  # raises again, preserving an error inside a property

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add metrics to `state.log_history` and pass them to the callbacks. `start_time` has no effect."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callbacks.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback (object or class)."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove a callback and return it."""
        removed: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return removed

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training prompts. Training does not use it."""
        size = self.args.local_batch_size
        return DataLoader(self.train_dataset, size, shuffle=True, collate_fn=self.data_collator, drop_last=True)

    def get_eval_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the evaluation prompts."""
        rows = [row for part in data_sets(self.eval_dataset) for row in part]
        return DataLoader(rows, self.args.per_device_eval_batch_size, collate_fn=self.data_collator)  # type: ignore[arg-type]

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """Make the policy compute the reference inside the block, by disabling its adapter if it has one."""
        backbone, loaded = self.setup.policy.backbone, self.setup.policy
        with backbone.adapter(loaded.initial_adapter) if loaded.adapter else nullcontext():
            yield
