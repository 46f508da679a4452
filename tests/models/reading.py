"""What every language model must do: give a text the same states and logits, however it is read."""

import torch

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
RESPONSES = [[20, 21, 22, 23, 24, 25, 26], [27], [28, 29, 30], [31, 32, 33, 34], [35, 36, 37, 38, 39], [40, 41]]
OWNER = [0, 0, 0, 1, 2, 2]
"""The prompt of each response. Windows of 8 are shorter than rows of up to 13 tokens."""
CLOSE = {"atol": 1e-5, "rtol": 0}


def read(backbone: Backbone, rows: list[int]) -> torch.Tensor:
    """[len(rows), T+1, H]: the states of responses, each behind a prompt of its own."""
    prompts, responses = [PROMPTS[OWNER[row]] for row in rows], [RESPONSES[row] for row in rows]
    return backbone.hidden(Padded.from_lists(prompts), Padded.from_lists(responses))


def own_logits(backbone: Backbone, prompt: list[int], response: list[int]) -> torch.Tensor:
    """What the transformers class itself says about the response tokens and the one after them: [T+1, V]."""
    if backbone.prompt_in_row:
        return backbone.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 :]
    decoder_ids = torch.tensor([[backbone.model.config.decoder_start_token_id, *response]])
    return backbone.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder_ids).logits[0]


@torch.no_grad()
def assert_reads_alike(backbone: Backbone) -> None:
    """Alone, in batches in any order, behind a shared prompt, whatever stands in the padding, and step by step."""
    alone = [read(backbone, [row])[0] for row in range(6)]
    assert backbone.logits(alone[0]).std() > 0.1  # near-uniform outputs would let wrong states pass
    for row, expected in enumerate(alone):
        if backbone.prompt_in_row and not backbone.causal:
            break  # the class itself would read a prefix model's prompt from left to right
        torch.testing.assert_close(
            backbone.logits(expected), own_logits(backbone, PROMPTS[OWNER[row]], RESPONSES[row]), **CLOSE
        )
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        _compare(read(backbone, order), alone, order)
    prompts, responses = Padded.from_lists(PROMPTS), Padded.from_lists(RESPONSES)
    refilled = [Padded(batch.ids.masked_fill(~batch.mask(), 50), batch.lengths) for batch in (prompts, responses)]
    for batch in ((prompts, responses), refilled):
        _compare(backbone.hidden(*batch, torch.tensor(OWNER)), alone, range(6))
    state, hidden = backbone.prefill(prompts.rows(OWNER))
    alive = list(range(6))
    for step in range(8):
        _compare(hidden[:, None], [states[step:] for states in alone], alive, 1)
        keep = [place for place, row in enumerate(alive) if len(RESPONSES[row]) > step]
        if len(keep) < len(alive):
            state.select(torch.tensor(keep, dtype=torch.long))
            alive = [alive[place] for place in keep]
        if alive:
            hidden = backbone.decode_step(state, torch.tensor([RESPONSES[row][step] for row in alive]))
    assert alive == []  # the longest response has 7 tokens: every state was compared


def _compare(found, alone, rows, length=None):
    for place, row in enumerate(rows):
        expected = alone[row][:length]
        torch.testing.assert_close(found[place, : len(expected)], expected, **CLOSE)
