"""The frozen models that score responses in a PPO run, as adapters on the policy's base or as separate models."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator
from peft import PeftConfig
from transformers import PreTrainedModel

from align.batches.encoding import decoded_turn
from align.core.errors import UserError
from align.data.records import Conversation
from align.models.adapters import add_adapter, changes_base
from align.models.backbone import flops_profile, is_prefix_lm
from align.models.folders import adapter_quantization, base_of, reads_prompts_whole
from align.models.heads import ScalarHead
from align.models.loading import LoadedModel, load_tokenization, print_other_base
from align.models.quantization import quantization_of
from align.models.roles import REWARD_ADAPTER, Roles
from align.models.vocabulary import require_rows, rows_of_texts, vocabulary_rows
from align.ppo.reward_functions import WeightedFunction
from align.reward.checkpoint import (
    REWARD,
    HeadType,
    LoadedReward,
    is_reward_model,
    load_head,
    load_reward_model,
    reward_that_reads_ids_of,
    scorer_folder,
)
from align.reward.remote import RemoteRewardModel, is_url
from align.reward.scoring import RewardModelScorer
from align.tokenization import ConversationError, Tokenization
from align.tokenization.encoded import EncodedPrompt
from align.training.run import Run

RewardModelLike = str | LoadedReward | PreTrainedModel
"""A folder, hub name or built-in name, a loaded reward model, or a classifier that reads the policy's token ids."""


def can_share_base(folder: str, policy: LoadedModel, kind: HeadType = REWARD) -> bool:
    """Return whether a reward model can be an adapter on the policy's base.

    It must be an adapter on the same base as the policy's adapter, and read the same token ids: the same tokenizer and chat
    template. Neither adapter may change weights of the base.
    """
    if policy.adapter is None or not is_reward_model(folder, kind):
        return False
    base, is_adapter = base_of(folder)
    same_base = is_adapter and Path(base).resolve() == Path(policy.base).resolve()
    quantization = quantization_of(policy.backbone.model.config)
    # A quantized run quantizes every base. An adapter trained on a quantized base must not be loaded onto another one.
    same_base = same_base and (bool(quantization) or not adapter_quantization(folder))
    assert policy.backbone.peft is not None
    same_base = same_base and not any(map(changes_base, policy.backbone.peft.peft_config.values()))
    same_base = same_base and not changes_base(PeftConfig.from_pretrained(folder))
    same_base = same_base and reads_prompts_whole(folder) == is_prefix_lm(policy.backbone.model.config)
    if not same_base:
        return False
    return load_tokenization(folder).reads_alike(policy.tokenization)


class RewardAdapter(NamedTuple):
    """A reward model that is an adapter on the policy's base."""

    head: ScalarHead
    mean: float
    """The mean of its rewards over demonstrations."""
    adapter: str
    """Name of its adapter on that base."""


def load_reward_adapter(
    folder: str, policy: LoadedModel, adapter: str = REWARD_ADAPTER, kind: HeadType = REWARD
) -> RewardAdapter:
    """Load a reward adapter onto the policy's base under the name `adapter`."""
    head, mean = load_head(folder, policy.backbone, kind)
    print_other_base(folder, policy.backbone.model)
    add_adapter(policy.backbone, folder, adapter)
    return RewardAdapter(head.requires_grad_(False), mean, adapter)


class RewardSource(NamedTuple):
    """A reward model of a run: an adapter on the policy's base, or a separate model."""

    name: str
    adapter_on_policy: RewardAdapter | None = None
    loaded: LoadedReward | None = None

    def scorer(self, policy: LoadedModel, roles: Roles, accelerator: Accelerator, budget: int) -> RewardModelScorer:
        """Return the scorer of this model, with at most `budget` padded tokens per forward pass."""
        if self.adapter_on_policy is not None:
            _, mean, adapter = self.adapter_on_policy
            module, profile = partial(roles.reward, adapter), flops_profile(policy.backbone, adapter)
            return RewardModelScorer(module, mean, policy.backbone, accelerator, budget, profile)
        assert self.loaded is not None
        return RewardModelScorer.from_loaded(self.loaded, policy.tokenization, accelerator, budget)


def load_source(
    model: RewardModelLike,
    policy: LoadedModel,
    dtype: str,
    adapter: str = REWARD_ADAPTER,
    kind: HeadType = REWARD,
    chat_template: str = "auto",
    quantization: str = "",
) -> RewardSource:
    """Load a model with a scalar head: as an adapter on the policy's base if possible, else as a separate model.

    Args:
        dtype: dtype of a model given by name.
        adapter: adapter name on the policy's base.
        chat_template: the policy's, for a classifier without a template.
        quantization: quantization of a separate model given by name.

    Raises:
        UserError: if the model is not of this kind.
    """
    if not isinstance(model, str):
        loaded = model if isinstance(model, LoadedReward) else reward_that_reads_ids_of(policy, model)
        return RewardSource(loaded.loaded.base, loaded=loaded)
    folder = scorer_folder(model)
    if can_share_base(folder, policy, kind):
        return RewardSource(folder, adapter_on_policy=load_reward_adapter(folder, policy, adapter, kind))
    return RewardSource(folder, loaded=load_reward_model(folder, dtype, chat_template, kind, quantization))


def split_remote(
    models: Sequence[RewardModelLike], policy: LoadedModel
) -> tuple[list[RewardModelLike], list[WeightedFunction]]:
    """Separate the models of this machine from those behind a URL, which are called as reward functions."""
    chat = policy.tokenization.chat

    def render(conversation: Conversation, text: str) -> tuple[str, str]:
        answer: Conversation = ({"role": "assistant", "content": text},)
        return chat.render(conversation, generation_prompt=True), chat.render(
            (*conversation, *answer), generation_prompt=False
        )

    urls = [model for model in models if isinstance(model, str) and is_url(model)]
    remote = [WeightedFunction("remote", 1.0, RemoteRewardModel(url, render), url) for url in urls]
    return [model for model in models if not (isinstance(model, str) and is_url(model))], remote


def make_scorer(
    source: RewardSource, run: Run, policy: LoadedModel, roles: Roles, prompts: Sequence[EncodedPrompt], max_new_tokens: int
) -> RewardModelScorer:
    """Return the scorer of a model that can process all prompts and responses. Print a line if its token ids differ."""
    run.models.add(source.name)
    scorer = source.scorer(policy, roles, run.accelerator, run.optimization.micro_batch_tokens)
    reads_ids = scorer.reads_given_ids and all(prompt.given_as_ids for prompt in prompts)
    if scorer.tokenization and not reads_ids:
        template = "" if source.loaded is None or source.loaded.has_template else run.model_config.chat_template
        form = f", which has no chat template and reads chat_template {template}" if template else ""
        turn = "; the decoded text of a prompt of token ids is one user turn" if any(p.given_as_ids for p in prompts) else ""
        run.print(f"{source.name}: reads other token ids than the policy; texts are tokenized again for it{form}{turn}")
    if scorer.tokenization is None or (scorer.reads_given_ids and any(prompt.given_as_ids for prompt in prompts)):
        sampled, asked = vocabulary_rows(policy.backbone.model), (prompt.ids for prompt in prompts)
        require_rows(scorer.backbone.model, rows_of_texts(policy.tokenization, sampled, asked), source.name)
    require_readable(source.name, scorer, prompts, max_new_tokens, policy)
    return scorer


def require_readable(
    name: str,
    scorer: RewardModelScorer,
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    policy: LoadedModel,
    after: int = 0,
) -> None:
    """Raise a UserError, before sampling, if a scoring model cannot process a response, or its template drops a turn.

    Args:
        after: number of tokens that the model reads after a response.
    """
    if scorer.tokenization:
        for prompt in prompts:
            if scorer.reads_given_ids and prompt.given_as_ids:
                continue
            if prompt.given_as_ids and (token := markup_in_text(prompt, policy.tokenization)):
                raise UserError(
                    f"{name}: reads texts, but a prompt of token ids contains {token!r}, as a chat template writes it; give "
                    "the turns of such prompts beside input_ids, in the field prompt or messages"
                )
            try:
                scorer.tokenization.chat.require_turns((*prompt.conversation, {"role": "assistant", "content": ""}))
            except ConversationError as error:
                raise UserError(f"{name}: {error}") from error
    scorer.require_context(name, prompts, max_new_tokens, policy.tokenization, after)


def markup_in_text(prompt: EncodedPrompt, policy: Tokenization) -> str | None:
    """Return a special token inside the text of a prompt of token ids, or None.

    The text is given in addition to the ids, or decoded from them. Decoding removes special tokens, and another template
    would put the roles that they mark, such as `user`, into the user's message.
    """
    if prompt.conversation != decoded_turn(prompt.ids, policy):
        return policy.chat.spelled_token(turn["content"] for turn in prompt.conversation)
    special = policy.chat.special_ids - {policy.chat.unknown_id}
    places = [place for place, token in enumerate(prompt.ids) if token not in special]
    inside = prompt.ids[places[0] : places[-1]] if places else []
    special_token = next((token for token in inside if token in special), None)
    return None if special_token is None else str(policy.tokenizer.decode([special_token]))
