"""FLOPs of each phase of a stage, from its settings and data, counted as its runs count them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from align.batches.encoding import Limits, encode_demonstrations, encode_prompts, encode_rankings
from align.batches.micro_batches import prompt_groups
from align.batches.mixtures import HasOpening, encode_mixture, hold_out, split_by_opening
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.model_registry.registry import resolve_model
from align.models.backbone import Backbone, flops_profile
from align.models.configs import base_of
from align.models.loading import LoadedModel, freeze_unused_lm_head, load_on_meta
from align.models.roles import REWARD_ADAPTER
from align.ppo.config import PPOConfig
from align.ppo.extensions.ptx import PtxExamples
from align.ppo.flops import RoleFlopsProfiles, phase_flops
from align.ppo.rollout import prompts_of_update
from align.reward.config import RewardConfig
from align.reward.train import example_flops as ranking_flops
from align.runtime.distributed import compute_dtype
from align.sampling.generation import SamplingParams
from align.sft.config import SFTConfig
from align.sft.train import example_flops, require_prompt_in_row
from align.tokenization.encoded import EncodedPrompt
from align.training.data_order import DataOrder
from align.training.memory import weights_bytes

Example = TypeVar("Example", bound=HasOpening)

COUNTED_UPDATES = 50
"""Updates of PPO whose prompts are counted; the others are assumed to be like them."""
DRAWN_EXAMPLES = 200
"""Examples of ptx that are drawn to estimate the mean."""


class StageWork(NamedTuple):
    """A stage that is planned.

    Attributes:
        flops: of each phase, over the whole run and all devices.
        weights: bytes of the weights of all models that it keeps.
        trained: the weights that are trained.
        decoded: bytes of weights that one device reads for sampling, by phase: each token of a batch reads all of them.
    """

    flops: dict[str, float]
    weights: int
    trained: Sequence[Tensor]
    config: SFTConfig | RewardConfig | PPOConfig
    decoded: Mapping[str, float] = MappingProxyType({})


def sft_work(config: SFTConfig) -> StageWork:
    """Count learning from demonstrations.

    Raises:
        UserError: for a mistake in the settings, the model or the data.
    """
    loaded = load_on_meta(config, compute_dtype(config.dtype), prefix_lm=config.prefix_lm)
    require_prompt_in_row(loaded, config.prompt_loss_weight)
    read = partial(encode_demonstrations, loaded=loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
    examples, epochs = _mixture(config, read)
    profile = flops_profile(loaded.backbone, loaded.adapter)
    learned = [example_flops(profile, example, config.prompt_loss_weight) for example in examples]
    return _learning(config, epochs, learned, loaded)


def reward_work(config: RewardConfig) -> StageWork:
    """Count learning from rankings. Raises: as `sft_work`."""
    loaded = load_on_meta(config, compute_dtype(config.dtype), REWARD_ADAPTER, allow_reward_model=True)
    read = partial(encode_rankings, loaded=loaded, limits=config.limits, skip_bad_rows=config.skip_bad_rows)
    rankings, epochs = _mixture(config, read)
    if not config.lm_loss_weight:
        freeze_unused_lm_head(loaded.backbone)
    profile = flops_profile(loaded.backbone, loaded.adapter)
    learned = [ranking_flops(loaded.backbone, profile, ranking, config.lm_loss_weight) for ranking in rankings]
    return _learning(config, epochs, learned, loaded)


def ppo_work(config: PPOConfig, devices: int) -> StageWork:
    """Count sampling, scoring, learning, ptx and evaluation, with every response as long as it may be.

    A reward model that does not exist yet is taken to have the policy's shape.

    Args:
        devices: the number of devices that share the work.

    Raises:
        UserError: as `sft_work`.
    """
    loaded = load_on_meta(config, compute_dtype(config.dtype))
    limits, backbone = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong), loaded.backbone
    every_prompt = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    prompts, fixed = split_by_opening(every_prompt, config.validation_split)
    if config.validation_prompts:
        fixed = encode_prompts(config.validation_prompts, loaded, limits, config.skip_bad_rows)
    policy = flops_profile(backbone, loaded.adapter)
    rewards = [_reward_model(name, loaded) for name in config.reward_model]
    separate = config.critic == "separate"
    profiles = RoleFlopsProfiles(
        policy,
        flops_profile(backbone, loaded.initial_adapter),
        policy if separate else None,
        tuple(flops_profile(model.backbone, model.adapter) for model in rewards),
        initial=policy if config.reference_refresh else None,
    )
    counted = min(config.total_updates, COUNTED_UPDATES)
    samples = config.samples_per_prompt
    drawn = (config.rollout_batch_size // samples, samples, config.seed)
    groups = (_work(config, backbone, prompts_of_update(prompts, n, *drawn)) for n in range(1, counted + 1))
    work = [group for update in groups for group in update]
    of_counted = phase_flops(profiles, work, config.num_ppo_epochs)
    phases = {name: flops * config.total_updates / counted for name, flops in of_counted.items()}
    if config.ptx:
        ptx = PtxExamples(config.ptx, loaded, config.max_prompt_tokens, config.seed, config.skip_bad_rows)
        mean = sum(map(ptx.flops, ptx.draw(DRAWN_EXAMPLES, (0,)))) / DRAWN_EXAMPLES
        responses = config.rollout_batch_size * config.num_ppo_epochs * config.total_updates
        phases["ptx"] = mean * config.ptx.per_response * responses
    rollouts = {"sampling": [config.rollout_batch_size] * config.total_updates}
    if fixed:
        times = 2 + (config.total_updates - 1) // config.eval_steps  # before the first update, and after the last
        judges = profiles._replace(critic=None)
        once = phase_flops(judges, _work(config, backbone, fixed), epochs=0)
        phases["evaluation"] = times * sum(once.values())
        rollouts["evaluation"] = [len(fixed)] * times
    row_tokens = max(len(prompt.ids) for prompt in prompts) + config.max_new_tokens
    token_bytes = weights_bytes([backbone]) * config.max_new_tokens
    decoded: dict[str, float] = {
        name: token_bytes * sum(_batches(rows, devices, row_tokens) for rows in sizes) for name, sizes in rollouts.items()
    }
    return StageWork(phases, *_ppo_weights(config, loaded, rewards), config, decoded)


def _trained(loaded: LoadedModel) -> list[Tensor]:
    return [weight for weight in loaded.backbone.parameters() if weight.requires_grad]


def _ppo_weights(config: PPOConfig, loaded: LoadedModel, rewards: Sequence[LoadedModel]) -> tuple[int, list[Tensor]]:
    """The bytes of all weights that PPO holds, and the weights that it trains."""
    trained, own = _trained(loaded), weights_bytes([loaded.backbone])
    frozen_copy = 0 if loaded.adapter else own  # with adapters, one base serves the reference too
    weights = own + frozen_copy * (2 if config.reference_refresh else 1)
    if config.critic == "separate":
        weights += sum(weight.numel() * weight.element_size() for weight in trained)
        trained = trained * 2
    weights += sum(weights_bytes([model.backbone]) for model in rewards if model is not loaded)
    return weights, trained


def _mixture(
    config: SFTConfig | RewardConfig, read: Callable[[Any], list[Example]]
) -> tuple[list[Example], DataOrder[Example]]:
    mixed, _ = hold_out(encode_mixture(config.train_data, read, config.task_prefixes), config.validation_split)
    return mixed.examples, DataOrder(mixed, config.seed, config.batch_size, config.mixing_cap, config.mixing_temperature)


def _learning(
    config: SFTConfig | RewardConfig, epochs: DataOrder[Any], flops: Sequence[float], loaded: LoadedModel
) -> StageWork:
    """Work of a stage that passes over examples of these FLOPs; a source may be over- or undersampled."""
    epoch, start = 0.0, 0
    for size, count in zip(epochs.sizes, epochs.counts, strict=True):
        epoch += count * sum(flops[start : start + size]) / size
        start += size
    phases = {"learning": config.num_train_epochs * epoch}
    return StageWork(phases, weights_bytes([loaded.backbone]), _trained(loaded), config)


def _reward_model(name: str, policy: LoadedModel) -> LoadedModel:
    """The reward model, whose tokenizer and weights are not needed; the policy itself if both are adapters on one base."""
    try:
        base, is_adapter = base_of(str(resolve_model(name)))
    except UserError:  # it is not trained yet
        return policy if policy.adapter else replace(policy)  # another model of the policy's shape
    if is_adapter and policy.adapter and base == policy.base:
        return policy
    dtype = policy.backbone.model.dtype
    return load_on_meta(ModelConfig(model=name), dtype, REWARD_ADAPTER, allow_reward_model=True)


def _work(config: PPOConfig, backbone: Backbone, prompts: Sequence[EncodedPrompt]) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt and of its responses, as `phase_flops` takes them."""
    ids, response_tokens = [prompt.ids for prompt in prompts], config.max_new_tokens
    responses = [[0] * response_tokens] * len(ids)
    groups = prompt_groups(backbone, ids, responses, range(len(ids)), config.micro_batch_tokens)
    return [(len(ids[group[0]]), [response_tokens] * len(group)) for group in groups]


def _batches(rows: int, devices: int, row_tokens: int) -> int:
    """Number of batches in which one device samples its part of a rollout."""
    own = -(-rows // devices)
    return -(-own // max(1, SamplingParams.batch_tokens // row_tokens))
