"""The `PPOTrainer` of TRL 0.4 to 0.11 on this library's losses and engine."""

import atexit
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

import align.ppo.config as core
from align.core.tensor_ops import masked_sum
from align.models.checkpoint import push_model
from align.models.heads import LanguageModel, ScalarHead
from align.models.loading import read_by_ids_of
from align.models.roles import ActorCritic, Roles
from align.ppo.actor_critic import copy_backbone
from align.ppo.extensions.given_optimizer import follow_rates, require_all_weights
from align.ppo.inputs import BASE_REFERENCE, with_reference_adapter
from align.ppo.losses import LossCoefficients, ppo_loss
from align.ppo.records import RoleOutputs
from align.ppo.rollout import forward_all_roles, pack_rollout, plan_minibatch, shuffled_minibatches
from align.runtime.distributed import gather_rows, run_on_main, zero_stage
from align.runtime.sharding import gathered_parameters, gathered_weights, place_frozen_model, sharded_loading
from align.training.model_source import ModelSource
from align.training.run import Run
from align.training.start import build_engine
from align.trl.config import InvalidArgumentError
from align.trl.legacy.config import PPOConfig, unused_settings
from align.trl.legacy.controllers import AdaptiveKLController, FixedKLController, RunningMoments
from align.trl.legacy.core import set_seed
from align.trl.legacy.reference import create_reference_model
from align.trl.legacy.rollout import (
    ScoredRollout,
    Targets,
    gathered_rollout,
    kl_of_distributions,
    kl_of_tokens,
    loss_inputs,
    minibatch_stats,
    scored_responses,
    targets,
)
from align.trl.trainer import end_processes
from align.trl.value_head import PreTrainedModelWrapper

INNER_METHODS = (
    *("compute_advantages", "compute_rewards", "loss", "train_minibatch", "record_step_stats", "_kl_penalty"),
    "_step_safety_checker",
)
"""Methods of TRL's trainer that change the algorithm if a subclass overrides them, and that `step` does not call."""
COPIED_METHODS = ("batched_forward_pass", "_generate_batched")
"""Methods that subclasses copy with small changes, and that are not called."""
NEW_ARGUMENTS = {
    "args": "config",
    "processing_class": "tokenizer",
    "train_dataset": "dataset",
    "reward_model": "call it in the script, and give its scores to step()",
    "value_model": "the value head of `model`",
    "optimizers": "optimizer, lr_scheduler",
    "peft_config": "AutoModelForCausalLMWithValueHead.from_pretrained(name, peft_config=...)",
}
"""Arguments of the trainer in TRL 0.12 and later."""
LOGGED_COLUMNS = ("query", "response")


class KnownArguments:
    """Refuses what TRL 0.11 does not have: arguments of later trainers, and methods that `step` would not call."""

    def __new__(cls, *values: Any, **given: Any) -> Self:
        if later := [name for name in given if name in NEW_ARGUMENTS and cls.__init__ is PPOTrainer.__init__]:
            places = "; ".join(f"`{name}`: {NEW_ARGUMENTS[name]}" for name in later)
            raise InvalidArgumentError(
                f"align.trl.legacy.PPOTrainer has the arguments of TRL 0.11: {places}. align.trl.PPOTrainer has those of "
                "TRL 0.12 to 1.12"
            )
        if overridden := [name for name in INNER_METHODS if hasattr(cls, name)]:
            raise InvalidArgumentError(
                f"{cls.__name__}.{overridden[0]} would never be called: change scores before step(), or write an extension "
                "of align.ppo (docs/howto/own-extension.md)"
            )
        return super().__new__(cls)


class PPOTrainer(KnownArguments):
    """PPO with the arguments, methods and statistics of TRL 0.11; docs/migrate-from-trl.md lists differences.

        trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset, data_collator=collator)
        for batch in trainer.dataloader:
            responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=20)
            scores = [torch.tensor(reward(text)) for text in tokenizer.batch_decode(responses)]
            stats = trainer.step(batch["input_ids"], responses, scores)

    The model is trained in place.

    Args:
        config: the settings.
        model: the policy with its value head.
        ref_model: the reference of the KL penalty. None: a copy of the policy, or with LoRA the policy without its adapter.
        tokenizer: of the policy.
        dataset: rows of `dataloader`; None: the script makes its own batches.
        optimizer: over all trained weights, in float32; None: Adam. Not under DeepSpeed.
        data_collator: of `dataloader`.
        num_shared_layers: without `ref_model`, freeze these first layers.
        lr_scheduler: of `optimizer`; advances in each step.
        training_data_collator: pads token ids in `prepare_model_inputs`; None: the tokenizer does.

    Raises:
        InvalidArgumentError: for arguments that do not belong together.
        UserError: for models that cannot be used.
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
        self.current_step, self.steps_done = 0, 0
        self.running, self.highest_reward = RunningMoments(), float("-inf")
        coefficient: tuple[float, float, int] = (config.init_kl_coef, config.target, int(config.horizon))
        self.kl_ctl = AdaptiveKLController(*coefficient) if config.adap_kl_ctrl else FixedKLController(config.init_kl_coef)
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
        """Make the run, the policy and the frozen reference from the given models."""
        # A script may have started accelerate, to learn its device for example.
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
        atexit.unregister(end_processes)
        atexit.register(end_processes)

    def _start_engine(
        self, optimizer: torch.optim.Optimizer | None, lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
    ) -> None:
        """Put policy and value head under the engine, with the given optimizer or Adam."""
        head = ScalarHead.around(self.model.v_head.summary)
        module = ActorCritic(self._policy.backbone, self._policy.adapter, head, with_entropy=True)
        frozen = LanguageModel(self._reference) if self._reference is not None else None
        self.run.print(self.run.memory.check(module, [frozen] if frozen else []))
        self.engine = build_engine(self.run, module, total_steps=1)
        placed = place_frozen_model(frozen, self.run.accelerator) if frozen else None
        self.roles = Roles(self.engine.module, placed)
        if optimizer is not None:
            require_all_weights(optimizer, self.engine)
            self.engine.optimizer = optimizer
            follow_rates(self.engine, optimizer)
        self.lr_scheduler = lr_scheduler

    def _set_sizes(self) -> None:
        """Store the sizes over all processes in the settings, as TRL does."""
        config, processes = self.config, self.accelerator.num_processes
        assert config.backward_batch_size is not None
        config.world_size, config.global_batch_size = processes, config.batch_size * processes
        config.global_backward_batch_size = config.backward_batch_size * processes
        config.is_encoder_decoder, config.is_peft_model = self.is_encoder_decoder, self.is_peft_model

    def _start_tracker(self) -> None:
        """Start the tracker of `log_stats`."""
        config, accelerator = self.config, self.accelerator
        if config.log_with is None:
            return
        accelerator.project_configuration = ProjectConfiguration(**config.project_kwargs)
        settings = config.to_dict()
        if config.log_with == "tensorboard":
            settings = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
        else:
            settings = {"trl_ppo_trainer_config": settings}
        accelerator.init_trackers(config.tracker_project_name, config=settings, init_kwargs=config.tracker_kwargs)

    # ------------------------------------------------------------------------------------------- attributes of the run

    @property
    def accelerator(self) -> Accelerator:
        """The processes and their devices."""
        return self.run.accelerator

    @property
    def current_device(self) -> torch.device:
        """The device of this process."""
        return self.__dict__.get("_device") or self.accelerator.device

    @current_device.setter
    def current_device(self, device: torch.device) -> None:
        self.__dict__["_device"] = device

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return bool(self.accelerator.num_processes > 1)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of policy and value head."""
        return self.engine.optimizer

    @property
    def optional_peft_ctx(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which a PEFT model computes without its adapter."""
        return self.model.pretrained_model.disable_adapter if self.is_peft_model else nullcontext

    # ------------------------------------------------------------------------------------------------------------ data

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None) -> DataLoader[Any]:
        """Return a loader of shuffled batches of `batch_size` rows; each process gets its own batches.

        Raises:
            InvalidArgumentError: for data without a length or with fewer rows than a batch.
        """
        rows = len(dataset) if hasattr(dataset, "__len__") else None
        if rows is None:
            raise InvalidArgumentError("`dataset` has no length: give a Dataset, such as Dataset.from_list(list(dataset))")
        if rows < self.config.batch_size * self.accelerator.num_processes:
            raise InvalidArgumentError(
                f"`dataset` has {rows} rows, but batch_size is {self.config.batch_size} on {self.accelerator.num_processes} "
                "processes: lower batch_size"
            )
        if isinstance(dataset, Dataset) and self.config.remove_unused_columns:
            kept = {"input_ids", "attention_mask", "label", *LOGGED_COLUMNS}
            dataset = dataset.remove_columns([name for name in dataset.column_names if name not in kept])
        size = self.config.batch_size
        loader = DataLoader(dataset, size, collate_fn=data_collator, shuffle=True, drop_last=True)
        prepared: DataLoader[Any] = self.accelerator.prepare_data_loader(loader)
        return prepared

    def prepare_model_inputs(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return the padded arguments of a forward pass of the model over queries and responses."""

        def padded(rows: Sequence[Tensor]) -> Any:
            return self.data_collator([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])

        if self.is_encoder_decoder:
            inputs, outputs = padded(queries), padded(responses)
            inputs |= {"decoder_input_ids": outputs["input_ids"], "decoder_attention_mask": outputs["attention_mask"]}
        else:
            inputs = padded([torch.cat([query, response]) for query, response in zip(queries, responses, strict=True)])
        inputs.pop("labels", None)
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
        """Sample a response to each query by the `generate` method of transformers.

        Args:
            query_tensor: ids of one query, or of several.
            length_sampler: draws `max_new_tokens` for each batch.
            batch_size: queries of a batch.
            return_prompt: whether to return queries with their responses; a T5 returns responses alone.
            generate_ref_response: whether the reference responds as well.
            pad_to_multiple_of: of the length of queries.
            remove_padding: whether to cut a response after its EOS token.
            generation_kwargs: arguments of `generate`.

        Returns:
            Of one query, ids [1, L]; of several, a list of ids [L]; with `generate_ref_response`, two of them.
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
        for model, context in models:
            rows: list[Tensor] = []
            with context(), self._readable(model):
                for start in range(0, len(queries), batch_size):
                    if length_sampler is not None:
                        generation_kwargs["max_new_tokens"] = length_sampler()
                    batch = queries[start : start + batch_size]
                    cuts = remove_padding and several
                    rows += self._generate_batch(model, batch, return_prompt, pad_to_multiple_of, cuts, generation_kwargs)
            outputs.append(rows if several else rows[0][None])
        return tuple(outputs) if generate_ref_response else outputs[0]

    @torch.no_grad()
    def _generate_batch(
        self,
        model: Any,
        queries: Sequence[Tensor],
        return_prompt: bool,
        multiple: int | None,
        cuts: bool,
        arguments: Mapping[str, Any],
    ) -> list[Tensor]:
        """Sample responses to some queries, padded to one length; the attention mask tells the padding."""
        longest = max(map(len, queries))
        width = longest if multiple is None else -(-longest // multiple) * multiple
        pad_id = next((id for id in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if id is not None), 0)
        ids, mask = (torch.full((len(queries), width), value) for value in (pad_id, 0))
        for row, query in enumerate(queries):
            place = slice(None, len(query)) if self.is_encoder_decoder else slice(width - len(query), None)
            ids[row, place], mask[row, place] = query.to("cpu"), 1
        device = self.current_device
        model.eval()
        written = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **arguments)
        rows = []
        for query, row in zip(queries, written, strict=True):
            prompt, response = (row[:0], row) if self.is_encoder_decoder else (row[width - len(query) : width], row[width:])
            ends = (response == self.tokenizer.eos_token_id).nonzero() if cuts and len(response) else ()
            if len(ends):
                response = response[: int(ends[0]) + 1]
            rows.append(torch.cat([prompt, response]) if return_prompt else response)
        return rows

    @contextmanager
    def _readable(self, model: Any) -> Iterator[None]:
        """Gather the weights of a model that ZeRO-3 has sharded."""
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
        """Train policy and value head on responses; return statistics under TRL's names.

        Args:
            queries: `batch_size` queries of this process, ids [L] each.
            responses: a response to each, ids [T].
            scores: a number for each.
            response_masks: [T] of each response, 1 on the tokens that the policy wrote; None: all of them.

        Raises:
            InvalidArgumentError: if an argument is not a list of `batch_size` such tensors.
            NotFiniteError: if a loss or gradient is not a number.
        """
        began = time.monotonic()
        start_id = self.model.config.decoder_start_token_id if self.is_encoder_decoder else None
        rows = scored_responses(self.config.batch_size, queries, responses, scores, response_masks, start_id)
        scored = gathered_rollout(rows, self._policy.backbone, self.accelerator)
        scored = ScoredRollout(scored.rollout, self._scaled(scored.scores), scored.mask)
        self._push_if_best(scored.scores)
        self.model.eval()
        # 1. Log-probs of policy and reference, and values, before the update.
        old = self._forward(scored)
        kl = self._kl(scored, old)
        forward_seconds = time.monotonic() - began
        # 2. Advantages from the scores and the KL penalty.
        chosen = targets(self.config, scored, kl, old.values, self.kl_ctl.value)
        # 3. Several epochs of minibatches, one optimizer step each.
        began_training = time.monotonic()
        train_stats = self._train(scored, old, chosen)
        stats = self._stats(scored, old, kl, chosen, train_stats) | self._text_stats(queries, responses)
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
        """Return scores scaled by their running moments and clipped, as the settings ask."""
        if self.config.use_score_scaling:
            self.running.update(scores)
            scores = self.running.scale(scores, shift_mean=self.config.use_score_norm)
        limit = self.config.score_clip
        return scores if limit is None else scores.clamp(-limit, limit)

    def _micro_batch_tokens(self, scored: ScoredRollout) -> int:
        """Return the padded tokens of TRL's forward passes."""
        return self.config.mini_batch_size * scored.longest

    def _minibatches(self, rows: int, epoch: int) -> list[list[int]]:
        """Return the rows of each optimizer step of an epoch."""
        assert self.config.global_backward_batch_size is not None
        count = rows // self.config.global_backward_batch_size
        return shuffled_minibatches(rows, 1, count, self.steps_done, epoch, self.config.seed)

    def _forward(self, scored: ScoredRollout) -> RoleOutputs:
        """Return log-probs of policy and reference, and values [B, T], before the update."""
        minibatches = self._minibatches(len(scored.rollout), 0)
        tokens, backbone = self._micro_batch_tokens(scored), self._policy.backbone
        return forward_all_roles(self.roles, scored.rollout, minibatches, backbone, 1.0, tokens, self.accelerator)

    def _kl(self, scored: ScoredRollout, old: RoleOutputs) -> Tensor:
        """Return the KL [B, T] of each token to the reference, by the estimator of the settings."""
        if self.config.kl_penalty != "full":
            return kl_of_tokens(old.log_probs, old.ref_log_probs, self.config.kl_penalty)
        if zero_stage(self.accelerator) == 3:
            raise InvalidArgumentError("kl_penalty is 'full', which needs whole models: use ZeRO-1 or 2, or another penalty")
        policy = (self._policy.backbone, self._policy.adapter)
        reference = (self._reference or self._policy.backbone, None)
        tokens = self._micro_batch_tokens(scored)
        return kl_of_distributions(policy, reference, scored.rollout, tokens, self.accelerator)

    def _train(self, scored: ScoredRollout, old: RoleOutputs, chosen: Targets) -> dict[str, float]:
        """Train for several epochs; return means of the statistics over optimizer steps."""
        config, rows = self.config, len(scored.rollout)
        every: list[dict[str, float]] = []
        for epoch in range(config.ppo_epochs):
            every += [self._optimize(scored, old, chosen, minibatch) for minibatch in self._minibatches(rows, epoch)]
            if config.early_stopping and every[-1]["policy/policykl"] > 1.5 * config.target_kl:
                break
        self.steps_done += 1
        return {name: float(np.mean([stats[name] for stats in every])) for name in every[0]}

    def _optimize(
        self, scored: ScoredRollout, old: RoleOutputs, chosen: Targets, minibatch: Sequence[int]
    ) -> dict[str, float]:
        """Make one optimizer step, and return its statistics."""
        config, device = self.config, self.accelerator.device
        limits = (config.cliprange, config.cliprange, config.cliprange_value)
        coefficients = LossCoefficients(*limits, config.vf_coef, ent_coef=0.0, kl_coef=0.0, kl_estimator=None)
        tokens = float(scored.mask[minibatch].sum())
        budget = self._micro_batch_tokens(scored)
        plan = plan_minibatch(scored.rollout, minibatch, self._policy.backbone, budget, self.accelerator)
        for rows in self.engine.micro_batches(plan):
            prompt, response, prompt_of_response = pack_rollout(scored.rollout, rows, device)
            new = self.roles.policy(prompt, response, 1.0, prompt_of_response)
            width = response.ids.shape[1]
            mask = scored.mask[rows, :width].to(device)
            batch = loss_inputs(old.log_probs, chosen, rows, width, device)
            loss, sums = ppo_loss((new.log_probs, new.values, new.entropy), batch, mask, tokens, coefficients)
            assert batch.returns is not None
            difference = new.log_probs - batch.old_log_probs
            further = {
                "policy/entropy": new.entropy,
                "policy/approxkl": 0.5 * difference**2,
                "policy/policykl": -difference,
                "val/vpred": new.values,
                "val/error": (new.values - batch.returns) ** 2,
            }
            sums |= {name: masked_sum(values.detach(), mask) / tokens for name, values in further.items()}
            self.engine.backward(loss, sums)
        sums_of_step = dict(self.engine.sums)
        skips = sums_of_step["ratio/mean"] > config.ratio_threshold
        if skips:
            self.run.print(
                f"warning: the mean ratio {sums_of_step['ratio/mean']:.2f} exceeds ratio_threshold "
                f"{config.ratio_threshold:.2f}: the minibatch is skipped"
            )
            self.engine.drop_gradients()
        self.engine.step(1)
        trained = 0.0 if skips else 1.0
        stats = {
            "loss/policy": trained * sums_of_step["loss/policy"],
            "loss/value": trained * sums_of_step["loss/value"],
            "loss/total": trained * sums_of_step["loss"],
            "policy/clipfrac": sums_of_step["policy/clipfrac"],
            "val/clipfrac": sums_of_step["value/clipfrac"],
        }
        names = ("policy/entropy", "policy/approxkl", "policy/policykl", "val/vpred", "val/error")
        stats |= {name: sums_of_step[name] for name in names}
        return stats | minibatch_stats(chosen, scored.mask, minibatch)

    # ------------------------------------------------------------------------------------------------------ statistics

    def _stats(
        self, scored: ScoredRollout, old: RoleOutputs, kl: Tensor, chosen: Targets, train_stats: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the statistics of a step over all processes."""
        mask, scores = scored.mask, scored.scores
        kl_of_responses = kl.masked_fill(~mask, 0.0).sum(1)
        stats: dict[str, Any] = {
            "objective/kl": float(kl_of_responses.mean()),
            "objective/kl_coef": self.kl_ctl.value,
            "objective/entropy": float(-old.log_probs.masked_fill(~mask, 0.0).sum(1).mean()),
            "ppo/mean_non_score_reward": chosen.non_score_reward,
            "ppo/mean_scores": float(scores.mean()),
            "ppo/std_scores": float(scores.std()) if len(scores) > 1 else 0.0,
        }
        if stats["objective/kl"] < -1.0:
            self.run.print(
                f"warning: the KL is {stats['objective/kl']:.2f} nats per response: responses were not sampled from the "
                "policy's own distribution, by top_k, top_p, a temperature or min_length for example"
            )
        stats |= {f"ppo/{name}": value for name, value in train_stats.items()}
        variance = train_stats["returns/var"]
        stats["ppo/val/var_explained"] = 1.0 - train_stats["val/error"] / variance if variance else float("nan")
        if self.config.log_with == "wandb":  # other trackers take single numbers
            stats |= {
                "objective/kl_dist": kl_of_responses.numpy(),
                "objective/logprobs": old.log_probs.numpy(),
                "objective/ref_logprobs": old.ref_log_probs.numpy(),
            }
        return stats

    def _text_stats(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> dict[str, Any]:
        """Return statistics of the lengths of queries and responses of all processes."""
        own = [(float(len(query)), float(len(response))) for query, response in zip(queries, responses, strict=True)]
        lengths = torch.tensor(gather_rows(own, self.accelerator))
        stats: dict[str, Any] = {}
        for name, column in (("queries", lengths[:, 0]), ("responses", lengths[:, 1])):
            stats[f"tokens/{name}_len_mean"] = float(column.mean())
            stats[f"tokens/{name}_len_std"] = float(column.std()) if len(column) > 1 else 0.0
            if self.config.log_with == "wandb":
                stats[f"tokens/{name}_dist"] = column.numpy()
        return stats

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Mapping[str, Any],
        rewards: Sequence[Any] | Tensor,
        columns_to_log: Sequence[str] = LOGGED_COLUMNS,
    ) -> None:
        """Send the statistics of a step to the tracker, with W&B also a table of the batch. All processes call this.

        Args:
            stats: returned by `step`.
            batch: has the columns of the table.
            rewards: of this process.
            columns_to_log: of the table.
        """
        own = [float(reward) for reward in (rewards.flatten() if isinstance(rewards, Tensor) else rewards)]
        every = torch.tensor(gather_rows(own, self.accelerator))
        logs = dict(stats)
        if self.config.log_with == "wandb":
            if missing := [column for column in columns_to_log if column not in batch]:
                raise InvalidArgumentError(f"log_stats: the batch has no column {', '.join(missing)}; set columns_to_log")
            rows = zip(*(batch[column] for column in columns_to_log), own, strict=True)
            table = gather_rows([list(row) for row in rows], self.accelerator)
            if self.accelerator.is_main_process:
                import wandb

                logs["game_log"] = wandb.Table(columns=[*columns_to_log, "reward"], rows=table)
        logs["env/reward_mean"] = float(every.mean())
        logs["env/reward_std"] = float(every.std()) if len(every) > 1 else 0.0
        logs["env/reward_dist"] = every.numpy()
        if self.config.log_with == "tensorboard":
            self.current_step += 1
            logs = {name: value for name, value in logs.items() if isinstance(value, int | float | str)}
        if self.config.log_with is not None:
            self.accelerator.log(logs, step=self.current_step if self.config.log_with == "tensorboard" else None)

    # ---------------------------------------------------------------------------------------------------------- saving

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the policy with its value head, and the tokenizer. All processes call this."""

        def write() -> None:
            self.model.save_pretrained(save_directory, **kwargs)
            self.tokenizer.save_pretrained(save_directory)

        with gathered_parameters(self.model.parameters()):
            run_on_main(write, self.accelerator)

    _save_pretrained = save_pretrained

    def push_to_hub(self, repo_id: str, commit_message: str = "Push model using align", token: str | None = None) -> str:
        """Upload the policy with its value head; return the address of the repository. A new one is private."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return run_on_main(lambda: push_model(Path(folder), repo_id, commit_message, token), self.accelerator)

    def _push_if_best(self, scores: Tensor) -> None:
        """Upload the policy if its mean score is the best so far, and the settings ask for it."""
        arguments, mean = self.config.push_to_hub_if_best_kwargs, float(scores.mean())
        if arguments and self.steps_done % self.config.compare_steps == 0 and mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**arguments)


def require_objects(
    config: object, model: object, ref_model: object, tokenizer: object, optimizer: object, lr_scheduler: object
) -> None:
    """Raise an InvalidArgumentError for an argument of the trainer of another kind."""
    expected = (
        ("config", config, PPOConfig, "an align.trl.legacy.PPOConfig"),
        ("model", model, PreTrainedModelWrapper, "a model with a value head of align.trl.legacy"),
        ("ref_model", ref_model, PreTrainedModelWrapper | None, "a model with a value head of align.trl.legacy, or None"),
        ("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer"),
    )
    for name, value, kind, wanted in expected:
        if not isinstance(value, kind):
            raise InvalidArgumentError(f"{name} must be {wanted}, got {type(value).__module__}.{type(value).__name__}")
    if ref_model is not None and ref_model is model:
        raise InvalidArgumentError("ref_model is the model itself, which is trained: give a copy, or None")
    if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", None) is not optimizer:
        raise InvalidArgumentError("lr_scheduler belongs to another optimizer: give its optimizer, too")


def core_config(config: PPOConfig) -> core.PPOConfig:
    """Return the settings of this library that the engine and the loading of models read.

    Nothing is written to `output_dir`.
    """
    folder = Path(config.project_kwargs.get("logging_dir") or tempfile.gettempdir()) / f"align-trl-legacy-{os.getpid()}"
    return core.PPOConfig(
        output_dir=str(folder),
        seed=config.seed,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_epsilon=1e-8,
        max_grad_norm=config.max_grad_norm or 0.0,
        gradient_checkpointing=config.gradient_checkpointing,
        report_to=[config.log_with or "none"],
        chat_template="raw",
        critic="shared",
        ignore_eos=True,
    )


def uncalled_methods(trainer: type[PPOTrainer]) -> list[str]:
    """Return a line for each method of a subclass that TRL's `step` calls and this one does not."""
    return [
        f"{trainer.__name__}.{name} is never called: step() computes log-probs, values and responses without padding"
        for name in COPIED_METHODS
        if hasattr(trainer, name)
    ]
