"""A rollout: its prompts, sampled responses, minibatches, and the outputs of every role.

A rollout of B responses is the same on every process. `shuffled_minibatches` divides its rows into minibatches, one per
optimizer step. `plan_minibatch` splits a minibatch by tokens into the micro-batches of this process. The
responses to one prompt form a group, which stays in one micro-batch and shares its prompt (`prompt_groups`).
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.batches.micro_batches import MicroBatch, group_batches, group_tokens, pack_groups, prompt_groups
from align.core.seeds import RngStream, SeedKey, generator
from align.models.backbone import Backbone
from align.models.roles import Roles
from align.ppo.records import RoleOutputs, Rollout
from align.runtime.distributed import gather_rows
from align.sampling.engines import SamplingEngine
from align.sampling.generation import SamplingParams
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedPrompt


def prompts_of_update(
    prompts: Sequence[EncodedPrompt], update: int, *, count: int, samples: int, seed: int
) -> list[EncodedPrompt]:
    """Return `count` prompts of an update (from 1), each `samples` times.

    Each pass over the data is reshuffled and complete before the next begins.
    """
    rows: list[int] = []
    first = (update - 1) * count
    while len(rows) < count:
        epoch, index = divmod(first + len(rows), len(prompts))
        order = generator(seed, RngStream.DATA_ORDER, epoch).permutation(len(prompts)).tolist()
        rows += order[index : index + count - len(rows)]
    return [prompts[row] for row in rows for _ in range(samples)]


def sample_rollout(
    sampler: SamplingEngine, tokenization: Tokenization, prompts: list[EncodedPrompt], sampling: SamplingParams, key: SeedKey
) -> Rollout:
    """Sample a response to each prompt with the random stream of `key`."""
    sampled = sampler.sample([prompt.ids for prompt in prompts], sampling, key)
    texts = [tokenization.text(ids) for ids in sampled.ids]
    ended = sampled.ended
    if not sampling.stops(tokenization.end_ids):  # each response has all tokens, and may contain an end token
        ended = [not tokenization.end_ids.isdisjoint(ids) for ids in sampled.ids]
    return Rollout(prompts=prompts, responses=sampled.ids, ended=ended, texts=texts, log_probs=sampled.log_probs)


def shuffled_minibatches(
    rows: int, *, samples: int, num_mini_batches: int, update: int, epoch: int, seed: int
) -> list[list[int]]:
    """Return the rows of each minibatch of an epoch, reshuffled each time; the samples of a prompt stay together.

    Args:
        samples: number of adjacent rows with the same prompt.
    """
    order = generator(seed, RngStream.MINIBATCH_ORDER, update, epoch).permutation(rows // samples).tolist()
    parts = (order[number::num_mini_batches] for number in range(num_mini_batches))
    return [[prompt * samples + sample for prompt in part for sample in range(samples)] for part in parts]


def plan_minibatch(
    rollout: Rollout, rows: Sequence[int], backbone: Backbone, micro_batch_tokens: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """Split a minibatch into micro-batches of this process, each prompt with all of its responses."""
    prompts = [prompt.ids for prompt in rollout.prompts]
    groups = prompt_groups(backbone, prompts, rollout.responses, rows, micro_batch_tokens)
    sizes = group_tokens(backbone, prompts, rollout.responses, groups)
    return group_batches(groups, sizes, micro_batch_tokens, accelerator)


@torch.no_grad()
def forward_all_roles(
    roles: Roles,
    rollout: Rollout,
    minibatches: Sequence[list[int]],
    backbone: Backbone,
    temperature: float,
    micro_batch_tokens: int,
    accelerator: Accelerator,
    with_value_states: bool = False,
) -> RoleOutputs:
    """Compute log-probs of policy and reference, values and entropy of every response token; the same on every process.

    Args:
        minibatches: rows of the minibatches of the first epoch of training. Kernels then see the same shapes, so that the
            ratio at the first minibatch is 1 in every dtype.
        backbone: the policy's backbone.
        with_value_states: whether to keep the input of the value head.
    """
    prompts, columns_of_row, value_states = [prompt.ids for prompt in rollout.prompts], dict[int, Tensor](), {}
    for minibatch in minibatches:
        for part in plan_minibatch(rollout, minibatch, backbone, micro_batch_tokens, accelerator):
            inputs = pack_groups(prompts, rollout.responses, part.groups, accelerator.device)
            policy = roles.policy(inputs.prompt, inputs.response, temperature, inputs.prompt_of_response)
            reference = roles.reference(inputs.prompt, inputs.response, temperature, inputs.prompt_of_response)
            outputs = (policy.log_probs, reference, policy.values, policy.entropy)
            columns = torch.stack([output.float() for output in outputs]).cpu()
            if not part.weight:  # a repeated row that keeps processes in lockstep
                continue
            for index, row in enumerate(part.rows):
                # A copy: pickling a view would send all rows of the micro-batch with each one.
                columns_of_row[row] = columns[:, index, : len(rollout.responses[row])].clone()
                if with_value_states and policy.value_states is not None:
                    value_states[row] = policy.value_states[index, : len(rollout.responses[row])].cpu()
    gathered = dict(gather_rows(list(columns_of_row.items()), accelerator))
    columns_of_outputs = zip(*(gathered[row] for row in range(len(rollout))), strict=True)
    log_probs, ref_log_probs, values, entropy = (pad_sequence(list(rows), batch_first=True) for rows in columns_of_outputs)
    return RoleOutputs(
        log_probs=log_probs, ref_log_probs=ref_log_probs, values=values, entropy=entropy, value_states=value_states
    )
