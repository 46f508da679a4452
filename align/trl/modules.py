"""Reward and value models whose own `forward` is called, as in TRL: modules with `base_model_prefix` and `score`.

The core evaluates plain transformers classifiers from their weights. User modules, and classifiers with hooks, a replaced
forward or an adapter, can compute anything, so they are called with padded token ids instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.batches.micro_batches import map_rows, pack_groups
from align.core.errors import UserError
from align.core.plugins import call_own_code
from align.core.tensor_ops import Padded
from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import DecoderBackbone, pack_rows
from align.models.backbone.kinds import has_separate_encoder
from align.models.backbone.user_changes import require_plain_head, require_published_forward, require_unchanged
from align.models.heads import ScalarHead
from align.models.roles import Roles
from align.ppo.extensions import Extension, TrainingContext
from align.ppo.inputs import CalledCritic
from align.ppo.records import Rollout
from align.ppo.reward_functions import WeightedFunction
from align.ppo.scoring_models import RewardModelLike
from align.ppo.trainer import split_rewards
from align.runtime.distributed import zero_stage
from align.training.engine import TrainEngine
from align.trl.config import InvalidArgumentError
from align.trl.value_head import PreTrainedModelWrapper


class CalledModule(NamedTuple):
    """Body and head of a called module. The body returns hidden states, and the head maps them to numbers [.., 1]."""

    name: str
    body: nn.Module
    score: nn.Module

    def numbers(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the number [B, L] of each token, in float32.

        Args:
            ids: token ids [B, L], padded with 0.
            mask: mask [B, L], 1 for real tokens.
            positions: position ids [B, L].

        Raises:
            UserError: If the module raises an error or returns an unexpected result.
        """
        output = call_own_code(
            self.name,
            self.body,
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            return_dict=True,
            output_hidden_states=True,
        )
        states = getattr(output, "hidden_states", None) or [getattr(output, "last_hidden_state", None)]
        if not isinstance(states[-1], Tensor):
            raise UserError(f"{self.name}: {type(self.body).__name__} returned no hidden_states; return those of all layers")
        numbers: Tensor = call_own_code(self.name, self.score, states[-1])
        if numbers.shape[:2] != ids.shape or numbers.shape[2:] not in ((), (1,)):
            raise UserError(f"{self.name}: score returned the shape {list(numbers.shape)}, not {[*ids.shape, 1]}")
        return numbers.reshape(ids.shape).float()


def called_module(model: object, name: str) -> CalledModule | None:
    """Return the parts of a model that must be called, or None if the core can evaluate it from its weights.

    Args:
        model: reward or value model.
        name: name of the argument, for errors.
    """
    if isinstance(model, PreTrainedModelWrapper):
        return _value_head_of_adapter(model, name)
    classifier = model.get_base_model() if isinstance(model, PeftModel) else model
    body = getattr(classifier, str(getattr(classifier, "base_model_prefix", "")), None)
    score = getattr(classifier, "score", None)
    if not (isinstance(body, nn.Module) and isinstance(score, nn.Module)) or _is_plain(model):
        return None
    return CalledModule(name, body, score)


def _is_plain(model: object) -> bool:
    """Return whether a model is an unmodified transformers classifier."""
    if not isinstance(model, PreTrainedModel):
        return False
    try:
        require_published_forward(model)
        require_unchanged(model, "", "")
        require_plain_head(model.score, "")  # type: ignore[arg-type]
    except UserError:
        return False
    return True


def _value_head_of_adapter(model: PreTrainedModelWrapper, name: str) -> CalledModule | None:
    """Return the parts of a PEFT model with a value head, or None for other models, which the core evaluates."""
    if not model.is_peft_model or has_separate_encoder(model.config):
        return None
    base = model.pretrained_model.get_base_model()
    return CalledModule(name, getattr(base, base.base_model_prefix), model.v_head)


class ModuleBackbone(DecoderBackbone):
    """Adapts a called module to the `Backbone` interface. Its hidden states are the numbers returned by the head.

    Args:
        module: module with all weights.
        called: body and head of the module.
    """

    def __init__(self, module: nn.Module, called: CalledModule) -> None:
        Backbone.__init__(self, module)  # type: ignore[arg-type]
        self._called = (called,)  # in a tuple, so that its weights are not registered twice

    @property
    def context_length(self) -> int | None:
        """Context length in the called module's config, or None."""
        config = getattr(self._called[0].body, "config", None)
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return int(limit) if limit else None

    def hidden(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return the numbers [B, T+1, 1] before each response token and after the last one."""
        if prompt_of_response is not None:
            prompt = prompt.rows(prompt_of_response)
        rows = pack_rows(prompt, response, None)
        numbers = self._called[0].numbers(rows.ids, (rows.segments >= 0).long(), rows.positions)
        return numbers[rows.row, rows.column][..., None]


class CalledHead(ScalarHead):
    """Head of a `ModuleBackbone`. It only reshapes, because the backbone has applied the module's head."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Convert hidden states [.., 1] to float32 numbers [..]."""
        return hidden.squeeze(-1).float()


def called_critic(value_model: nn.Module) -> CalledCritic | None:
    """Return a critic that calls a value model, or None if the core can evaluate the model.

    Raises:
        InvalidArgumentError: If all weights of the model are frozen.
    """
    called = called_module(value_model, "value_model")
    if called is None:
        return None
    if not any(weight.requires_grad for weight in value_model.parameters()):
        raise InvalidArgumentError(
            "value_model: all its weights are frozen; call requires_grad_(True) on it, or a part of it"
        )
    return CalledCritic(ModuleBackbone(value_model.eval(), called), CalledHead())


class ModuleReward(Extension):
    """Calls a reward model with token ids.

    Args:
        module: reward model.
        called: body and head of the reward model.
        pad_id: token before which responses are truncated. If None, responses are not truncated.
        rows: number of responses per forward pass.
    """

    name = "reward_model"
    gives_scores = True

    def __init__(self, module: nn.Module, called: CalledModule, pad_id: int | None, rows: int) -> None:
        self.modules, self.pad_id, self.rows = [module], pad_id, rows
        self.backbone = ModuleBackbone(module, called)
        self.card = {"reward model": type(module).__name__}

    def load(self, context: TrainingContext) -> None:
        require_whole_weights(context.run.accelerator, "reward_model")
        longest = max(len(prompt.ids) for prompt in context.prompts)
        self.backbone.require_fit(longest, context.max_new_tokens, "reward_model")

    def start(self, engine: TrainEngine, roles: Roles) -> None:
        self.accelerator = engine.accelerator
        self.backbone.eval().to(self.accelerator.device)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> dict[str, Tensor]:
        prompts = [prompt.ids for prompt in rollout.prompts]
        responses = [self._read(ids) for ids in rollout.responses]

        def score_rows(rows: Sequence[int]) -> list[float]:
            inputs = pack_groups(prompts, responses, [[row] for row in rows], self.accelerator.device)
            numbers = self.backbone.hidden(inputs.prompt, inputs.response)[..., 0]
            scores: list[float] = numbers[torch.arange(len(rows)), inputs.response.lengths].tolist()
            return scores

        costs = [1] * len(prompts)
        return {"model": torch.tensor(map_rows(costs, self.rows, self.accelerator, score_rows))}

    def _read(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self.pad_id)] if self.pad_id in ids else ids


def require_whole_weights(accelerator: Accelerator, name: str) -> None:
    """Raise InvalidArgumentError under ZeRO-3, where user modules cannot be called."""
    if zero_stage(accelerator) == 3:
        raise InvalidArgumentError(
            f"{name} is a module that is called as it is, which ZeRO-3 does not support: use ZeRO-1 or 2, or a transformers "
            "classifier"
        )


def rewards_of(
    reward_model: Any, pad_id: int | None, rows: int
) -> tuple[list[RewardModelLike], list[WeightedFunction], list[Extension]]:
    """Return the core's reward models and functions, and the extension that calls a user module.

    Args:
        reward_model: `reward_model` argument of the trainer.
        pad_id: padding token of the tokenizer.
        rows: number of responses per forward pass of a user module.
    """
    if called := called_module(reward_model, "reward_model"):
        return [], [], [ModuleReward(reward_model, called, pad_id, rows)]
    # Use the tokenizer's padding token, as TRL does. The classifier's may be the EOS token, at which the score is read.
    if isinstance(reward_model, PreTrainedModel):
        reward_model.config.pad_token_id = pad_id
    several = reward_model if isinstance(reward_model, list) else [reward_model]
    return *split_rewards(several, "reward_model"), []
