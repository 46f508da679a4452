"""From a rollout to minibatches, their micro-batches, and what every role computes for them."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.batches.micro_batches import MicroBatch, group_batches, group_tokens, pack_groups, prompt_groups
from align.core.seeds import Stream, generator
from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.roles import Roles
from align.ppo.records import RoleOutputs, Rollout
from align.runtime.distributed import gather_rows


def shuffled_minibatches(rows: int, samples: int, minibatches: int, update: int, epoch: int, seed: int) -> list[list[int]]:
    """Return the rows of each minibatch of an epoch, reshuffled each time; the samples of a prompt stay together.

    Args:
        samples: neighboring rows with one prompt.
    """
    order = generator(seed, Stream.MINIBATCH_ORDER, update, epoch).permutation(rows // samples).tolist()
    parts = (order[number::minibatches] for number in range(minibatches))
    return [[prompt * samples + sample for prompt in part for sample in range(samples)] for part in parts]


def plan_minibatch(
    rollout: Rollout, rows: Sequence[int], backbone: Backbone, micro_batch_tokens: int, accelerator: Accelerator
) -> list[MicroBatch]:
    """Return a minibatch cut into micro-batches of this process, each prompt with all of its responses."""
    prompts = [prompt.ids for prompt in rollout.prompts]
    groups = prompt_groups(backbone, prompts, rollout.responses, rows, micro_batch_tokens)
    sizes = group_tokens(backbone, prompts, rollout.responses, groups)
    return group_batches(groups, sizes, micro_batch_tokens, accelerator)


def pack_rollout(rollout: Rollout, rows: Sequence[int], device: torch.device) -> tuple[Padded, Padded, Tensor | None]:
    """Return prompts and responses of some rows, and each response's prompt index, ready for a module."""
    return pack_groups([prompt.ids for prompt in rollout.prompts], rollout.responses, rows, device)


@torch.no_grad()
def forward_all_roles(
    roles: Roles,
    rollout: Rollout,
    minibatches: Sequence[list[int]],
    backbone: Backbone,
    temperature: float,
    micro_batch_tokens: int,
    accelerator: Accelerator,
) -> RoleOutputs:
    """Compute log-probs of policy and reference, values and entropy of every response token; the same on every process.

    Args:
        minibatches: the rows, as the first epoch of training will batch them: the same kernels then see the same shapes,
            and the ratio at the first minibatch is 1 in every number format.
        backbone: the policy's.
    """
    scored: dict[int, Tensor] = {}
    for rows in minibatches:
        for batch in plan_minibatch(rollout, rows, backbone, micro_batch_tokens, accelerator):
            prompt, response, prompt_index = pack_rollout(rollout, batch.rows, accelerator.device)
            policy = roles.policy(prompt, response, temperature, prompt_index)
            reference = roles.reference(prompt, response, temperature, prompt_index)
            outputs = [policy.log_probs, reference, policy.values, policy.entropy]
            if roles.reference_moves:
                outputs.append(roles.initial(prompt, response, temperature, prompt_index))
            columns = torch.stack([column.float() for column in outputs])
            if batch.weight:
                for index, row in enumerate(batch.rows):
                    scored[row] = columns[:, index, : len(rollout.responses[row])].cpu()
    everywhere = dict(gather_rows(list(scored.items()), accelerator))
    outputs_by_row = zip(*(everywhere[row] for row in range(len(rollout))), strict=True)
    return RoleOutputs(*(pad_sequence(list(column), batch_first=True) for column in outputs_by_row))
