"""`PPOTrainer` of TRL 0.4 to 0.11, with this library's losses and engine."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from align.models.checkpoint import push_model
from align.models.heads import LanguageModel, ScalarHead
from align.models.loading import read_by_ids_of
from align.models.roles import ActorCritic, Roles
from align.ppo.actor_critic import copy_backbone
from align.ppo.inputs import BASE_REFERENCE, with_reference_adapter
from align.runtime.distributed import gather_rows, run_on_main, zero_stage
from align.runtime.sharding import gathered_parameters, gathered_weights, place_frozen_model, sharded_loading
from align.training.model_source import ModelSource
from align.training.run import Run
from align.training.setup import build_engine
from align.trl.config import InvalidArgumentError
from align.trl.hooks import end_processes_at_exit
from align.trl.legacy.config import PPOConfig, unused_settings
from align.trl.legacy.controllers import RunningMoments, kl_controller
from align.trl.legacy.core import set_seed
from align.trl.legacy.data import LOGGED_COLUMNS, loader_of, model_inputs
from align.trl.legacy.learner import Learner
from align.trl.legacy.reference import create_reference_model
from align.trl.legacy.rollout import ScoredRollout, estimate, gathered_rollout, scored_responses
from align.trl.legacy.sampling import cut_after, sample_responses
from align.trl.legacy.setup import KnownArguments, core_config, require_objects, uncalled_methods
from align.trl.legacy.statistics import negative_kl_warning, reward_stats, step_stats, text_stats
from align.trl.value_head import PreTrainedModelWrapper


class PPOTrainer(KnownArguments):
    """PPO trainer with the arguments, methods and statistics of TRL 0.11. docs/migrate-from-trl.md lists the differences.

        trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset, data_collator=collator)
        for batch in trainer.dataloader:
            responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=20)
            scores = [torch.tensor(reward(text)) for text in tokenizer.batch_decode(responses)]
            stats = trainer.step(batch["input_ids"], responses, scores)

    The model is trained in place.

    Args:
        config: settings.
        model: policy with a value head.
        ref_model: reference of the KL penalty. Default: a copy of the policy, or with LoRA the policy without its adapter.
        tokenizer: tokenizer of the policy.
        dataset: rows of `dataloader`. If None, the script creates its own batches.
        optimizer: optimizer over all trained weights, which must be in float32. Not supported with DeepSpeed. Default: Adam.
        data_collator: collator of `dataloader`.
        num_shared_layers: number of first layers to freeze if there is no `ref_model`.
        lr_scheduler: scheduler of `optimizer`, which advances once per step.
        training_data_collator: collator that pads token ids in `prepare_model_inputs`. Default: the tokenizer's padding.

    Raises:
        InvalidArgumentError: If an argument is invalid or excluded by another.
        UserError: If a model cannot be used.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: PreTrainedModelWrapper | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        training_data_collator: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        require_objects(config, model, ref_model, tokenizer, optimizer, lr_scheduler)
        assert config is not None
        assert model is not None
        assert tokenizer is not None
        set_seed(config.seed)
        self.config, self.model, self.tokenizer, self.dataset = config, model, tokenizer, dataset
        self.ref_model: PreTrainedModelWrapper | None = ref_model
        self.is_encoder_decoder, self.is_peft_model = bool(model.config.is_encoder_decoder), model.is_peft_model
        self.current_step = 0
        self.running, self.highest_reward = RunningMoments(), float("-inf")
        self.kl_ctl = kl_controller(config)
        self._load_models(num_shared_layers)
        self._start_engine(optimizer, lr_scheduler)
        self._set_sizes()
        self._start_tracker()
        self.data_collator: Any = training_data_collator or DataCollatorForLanguageModeling(tokenizer, mlm=False)
        self.dataloader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)
        for line in [*unused_settings(config), *uncalled_methods(type(self))]:
            self.run.print(f"warning: {line}")

    # ------------------------------------------------------------------------------------------------- the constructor

    def _load_models(self, num_shared_layers: int | None) -> None:
        """Create the run, the policy and the frozen reference from the given models."""
        # A script may have initialized accelerate, for example to get its device.
        AcceleratorState._reset_state(reset_partial_state=True)
        if num_shared_layers is not None and self.ref_model is None:
            self.ref_model = create_reference_model(self.model, num_shared_layers)
        source = ModelSource(self.model.pretrained_model, self.tokenizer)
        self.run = Run(source.settings(core_config(self.config)), "ppo")
        policy = source.load(self.run)
        self._policy = with_reference_adapter(policy, BASE_REFERENCE) if self.is_peft_model else policy
        self._reference: Any = None
        if self.ref_model is not None:
            self._reference = read_by_ids_of(policy, self.ref_model.pretrained_model, "ref_model")
        elif not self.is_peft_model:
            with sharded_loading(self.run.accelerator):
                self._reference = copy_backbone(policy.backbone)
            self.ref_model = type(self.model)(self._reference.model)
        end_processes_at_exit()

    def _start_engine(
        self, optimizer: torch.optim.Optimizer | None, lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    ) -> None:
        """Create the engine for policy and value head, with the given optimizer or Adam."""
        head = ScalarHead.around(self.model.v_head.summary)
        module = ActorCritic(self._policy.backbone, self._policy.adapter, head, with_entropy=True)
        frozen = LanguageModel(self._reference) if self._reference is not None else None
        self.run.print(self.run.memory.check(module, [frozen] if frozen else []))
        self.engine = build_engine(self.run, module, total_steps=1)
        placed = place_frozen_model(frozen, self.run.accelerator) if frozen else None
        roles = Roles(self.engine.module, placed)
        self._learner = Learner(self.config, self._policy, self._reference, roles, self.engine)
        if optimizer is not None:
            self.engine.use_optimizer(optimizer)
        self.lr_scheduler = lr_scheduler

    def _set_sizes(self) -> None:
        """Store the global batch sizes in the settings, as TRL does."""
        config, processes = self.config, self.accelerator.num_processes
        assert config.backward_batch_size is not None
        config.world_size, config.global_batch_size = processes, config.batch_size * processes
        config.global_backward_batch_size = config.backward_batch_size * processes
        config.is_encoder_decoder, config.is_peft_model = self.is_encoder_decoder, self.is_peft_model

    def _start_tracker(self) -> None:
        """Start the tracker used by `log_stats`."""
        config, accelerator = self.config, self.accelerator
        if config.log_with is None:
            return
        accelerator.project_configuration, settings = ProjectConfiguration(**config.project_kwargs), config.to_dict()
        if config.log_with == "tensorboard":
            settings = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
        else:
            settings = {"trl_ppo_trainer_config": settings}
        accelerator.init_trackers(config.tracker_project_name, config=settings, init_kwargs=config.tracker_kwargs)

    # ------------------------------------------------------------------------------------------- attributes of the run

    @property
    def accelerator(self) -> Accelerator:
        """Accelerator of the run."""
        return self.run.accelerator

    @property
    def current_device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.__dict__.get("_device", self.accelerator.device)
        return device

    @current_device.setter
    def current_device(self, device: torch.device) -> None:
        self.__dict__["_device"] = device

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes."""
        return bool(self.accelerator.num_processes > 1)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of policy and value head."""
        return self.engine.optimizer

    @property
    def optional_peft_ctx(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager that disables the adapter of a PEFT model."""
        return self.model.pretrained_model.disable_adapter if self.is_peft_model else nullcontext

    # ------------------------------------------------------------------------------------------------------------ data

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None) -> DataLoader[Any]:
        """Return a loader of shuffled batches of `batch_size` rows. Each process gets different batches.

        Raises:
            InvalidArgumentError: If the data set has no length, or too few rows for a batch on each process.
        """
        return loader_of(dataset, self.config, data_collator, self.accelerator)

    def prepare_model_inputs(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return the padded model inputs for queries and responses."""
        inputs: Any = model_inputs(queries, responses, self.data_collator, self.is_encoder_decoder)
        moved: Mapping[str, Tensor] = inputs.to(self.current_device)
        return moved

    # -------------------------------------------------------------------------------------------------------- sampling

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        pad_to_multiple_of: int | None = None,
        remove_padding: bool = True,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample a response to each query with transformers' `generate`.

        Args:
            query_tensor: token ids [L] of a query, or a list with the token ids of several queries.
            length_sampler: function that draws `max_new_tokens` for each batch.
            batch_size: number of queries per batch.
            return_prompt: whether to return queries with their responses. T5 models return only responses.
            generate_ref_response: whether to sample from the reference as well.
            pad_to_multiple_of: pad the length of queries to a multiple of this.
            remove_padding: whether to truncate responses after the EOS token.
            generation_kwargs: arguments of `generate`.

        Returns:
            Token ids [1, L] for a single query, or a list of token ids [L]. With `generate_ref_response`, a pair of these.
        """
        several = isinstance(query_tensor, list)
        queries: Any = query_tensor if several else [query_tensor]
        if not (queries and all(isinstance(query, Tensor) and query.dim() == 1 for query in queries)):
            raise InvalidArgumentError(
                "query_tensor must be a tensor of shape (`seq_len`) or a list of tensors of shape (`seq_len`)"
            )
        models: list[tuple[Any, Any]] = [(self.model, nullcontext)]
        if generate_ref_response:
            models.append((self.ref_model or self.model, self.optional_peft_ctx))
        outputs: list[Any] = []
        end_id = self.tokenizer.eos_token_id if remove_padding and several else None
        for model, context in models:
            rows: list[Tensor] = []
            with context(), self._readable(model):
                for start in range(0, len(queries), batch_size):
                    if length_sampler is not None:
                        generation_kwargs["max_new_tokens"] = length_sampler()
                    batch = (queries[start : start + batch_size], self.tokenizer, self.current_device)
                    sampled = sample_responses(model, *batch, generation_kwargs, pad_to_multiple_of)
                    pairs = [(query, cut_after(response, end_id)) for query, response in sampled]
                    with_query = return_prompt and not self.is_encoder_decoder
                    rows += [torch.cat(pair) if with_query else pair[1] for pair in pairs]
            outputs.append(rows if several else rows[0][None])
        return tuple(outputs) if generate_ref_response else outputs[0]

    @contextmanager
    def _readable(self, model: Any) -> Iterator[None]:
        """Gather the weights of a model inside the block if ZeRO-3 has sharded them."""
        if zero_stage(self.accelerator) < 3:
            yield
        elif model is self.model:
            with gathered_weights(self.engine.module, self.accelerator):
                yield
        else:
            with gathered_parameters(model.parameters()):
                yield

    # -------------------------------------------------------------------------------------------------------- training

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Train policy and value head on responses. Return statistics under TRL's names.

        Args:
            queries: token ids [L] of the `batch_size` queries of this process.
            responses: token ids [T] of the response to each query.
            scores: score of each response.
            response_masks: mask [T] of each response, 1 for tokens sampled from the policy. Default: all tokens.

        Raises:
            InvalidArgumentError: If an argument is not a list of `batch_size` such tensors.
            NotFiniteError: If a loss or gradient is not finite.
        """
        began = time.monotonic()
        start_id = self.model.config.decoder_start_token_id if self.is_encoder_decoder else None
        rows = scored_responses(self.config.batch_size, queries, responses, scores, response_masks, start_id)
        scored = gathered_rollout(rows, self._policy.backbone, self.accelerator)
        scored = ScoredRollout(scored.rollout, self._scaled(scored.scores), scored.mask)
        self._push_if_best(scored.scores)
        self.model.eval()
        # 1. Log-probs of policy and reference, and values, before the update.
        learner = self._learner
        old = learner.forward(scored)
        kl = learner.kl(scored, old)
        forward_seconds = time.monotonic() - began
        # 2. Advantages from the scores and the KL penalty.
        estimates = estimate(self.config, scored, kl, old.values, self.kl_ctl.value)
        # 3. Several epochs of minibatches, one optimizer step each.
        began_training = time.monotonic()
        train_stats = learner.train(scored, old, estimates)
        with_arrays = self.config.log_with == "wandb"  # other trackers accept only single numbers
        stats = step_stats(scored, old, kl, estimates, train_stats, self.kl_ctl.value, with_arrays)
        stats |= text_stats(queries, responses, self.accelerator, with_arrays)
        self.run.print(negative_kl_warning(stats["objective/kl"]))
        stats["time/ppo/forward_pass"] = forward_seconds
        stats["time/ppo/optimize_step"] = time.monotonic() - began_training
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        # 4. Adapt the KL coefficient.
        self.kl_ctl.update(stats["objective/kl"], len(scored.rollout))
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        stats["time/ppo/total"] = time.monotonic() - began
        return stats

    def _scaled(self, scores: Tensor) -> Tensor:
        """Scale scores by their running moments and clip them, according to the settings."""
        if self.config.use_score_scaling:
            self.running.update(scores)
            scores = self.running.scale(scores, shift_mean=self.config.use_score_norm)
        limit = self.config.score_clip
        return scores if limit is None else scores.clamp(-limit, limit)

    # ------------------------------------------------------------------------------------------------------ statistics

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Mapping[str, Any],
        rewards: Sequence[Any] | Tensor,
        columns_to_log: Sequence[str] = LOGGED_COLUMNS,
    ) -> None:
        """Log the statistics of a step to the tracker and, with W&B, a table of the batch. Call this on all processes.

        Args:
            stats: statistics returned by `step`.
            batch: batch with the columns of the table.
            rewards: rewards of this process.
            columns_to_log: columns of the table.
        """
        logs = dict(stats)
        if self.config.log_with == "wandb":
            if missing := [column for column in columns_to_log if column not in batch]:
                raise InvalidArgumentError(f"log_stats: the batch has no column {', '.join(missing)}; set columns_to_log")
            own = [float(reward) for reward in rewards]
            rows = zip(*(batch[column] for column in columns_to_log), own, strict=True)
            table = gather_rows([list(row) for row in rows], self.accelerator)
            if self.accelerator.is_main_process:
                import wandb

                logs["game_log"] = wandb.Table(columns=[*columns_to_log, "reward"], rows=table)
        logs |= reward_stats(rewards, self.accelerator)
        if self.config.log_with == "tensorboard":
            self.current_step += 1
            logs = {name: value for name, value in logs.items() if isinstance(value, int | float | str)}
        if self.config.log_with is not None:
            self.accelerator.log(logs, step=self.current_step if self.config.log_with == "tensorboard" else None)

    # ---------------------------------------------------------------------------------------------------------- saving

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the policy with its value head, and the tokenizer. Call this on all processes."""

        def write() -> None:
            self.model.save_pretrained(save_directory, **kwargs)
            self.tokenizer.save_pretrained(save_directory)

        with gathered_parameters(self.model.parameters()):
            run_on_main(write, self.accelerator)

    _save_pretrained = save_pretrained

    def push_to_hub(self, repo_id: str, commit_message: str = "Push model using align", token: str | None = None) -> str:
        """Upload the policy with its value head. Return the URL of the repository. New repositories are private."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return run_on_main(lambda: push_model(Path(folder), repo_id, commit_message, token), self.accelerator)

    def _push_if_best(self, scores: Tensor) -> None:
        """Upload the policy if its mean score is the best so far and uploading is enabled in the settings."""
        arguments, mean = self.config.push_to_hub_if_best_kwargs, float(scores.mean())
        if arguments and self._learner.steps_done % self.config.compare_steps == 0 and mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**arguments)
