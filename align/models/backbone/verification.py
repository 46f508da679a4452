"""Checks that a newly wrapped model must pass on a few tokens."""

import torch
from torch import Tensor

from align.core.errors import UserError
from align.core.tensor_ops import Padded, length_mask
from align.models.backbone.contract import Backbone
from align.models.backbone.decoder import is_prefix_lm
from align.models.backbone.encoder import EncoderBackbone


@torch.no_grad()
def verify(backbone: Backbone) -> bool:
    """Compare a backbone with itself and with its model's forward pass; return whether responses can share a row."""
    model = backbone.model
    was_training = model.training
    model.train(False)
    try:
        if isinstance(backbone, EncoderBackbone):  # one state per row
            _require_padding_is_ignored(backbone)
            return False
        shares_prompts = _can_share_prompts(backbone)
        if is_prefix_lm(model.config):
            _require_whole_prompts(backbone, shares_prompts)
        _require_causality(backbone)
        _require_padding_is_ignored(backbone)
        if model.get_output_embeddings() is not None:  # a classifier has none: it scores text and never samples
            _require_own_logits(backbone)
            _require_cache(backbone)
        return shares_prompts
    finally:
        model.train(was_training)


def _require_whole_prompts(backbone: Backbone, shares_prompts: bool) -> None:
    """Require an attention that accepts any mask with separate positions, which a prefix language model needs."""
    name = f"prefix_lm: {_name(backbone)}"
    if not shares_prompts:
        raise UserError(f"{name} takes no mask over a whole prompt (its positions, as ALiBi's, are part of its attention)")
    found: list[Tensor] = []  # states of all tokens of a row, which `hidden` does not return
    hook = backbone.model.base_model.register_forward_hook(lambda *call: found.append(call[-1].last_hidden_state))
    try:
        for last in (7, 9):
            backbone.hidden(_rows(backbone, [5, 6, last]), _rows(backbone, [8]))
    finally:
        hook.remove()
    if torch.equal(found[0][:, 0], found[1][:, 0]):
        raise UserError(f"{name} reads a prompt from left to right whatever its mask says; leave it off")


def _tolerance(backbone: Backbone, states: Tensor) -> float:
    """Return the maximum difference allowed between states from batches of different shapes.

    bfloat16 has 8 significant bits, so products summed in another order differ by a few units in the last place.
    """
    relative = 1e-3 if backbone.model.dtype == torch.float32 else 0.1
    return relative * max(1.0, float(states.abs().max()))


def _rows(backbone: Backbone, *rows: list[int]) -> Padded:
    """Return rows of tokens from the middle of the vocabulary.

    The first tokens are often special and rare in training: SmolLM2-135M's states for them are so unstable that another
    kernel's rounding in bfloat16 changes them by more than their size.
    """
    size = backbone.model.config.vocab_size
    return Padded.from_lists([[(size // 2 + token) % size for token in row] for row in rows]).to(backbone.device)


def _name(backbone: Backbone) -> str:
    return f"model type '{backbone.model.config.model_type}'"


def _require_causality(backbone: Backbone) -> None:
    """Require that a later response token does not change an earlier state."""
    prompt = _rows(backbone, [5, 6, 7])
    first, second = (backbone.hidden(prompt, _rows(backbone, [8, 9, last])) for last in (4, 11))
    # Shapes are equal and later tokens have weight exactly 0, so even bfloat16 should give equal bits here.
    limit = 0.01 * _tolerance(backbone, first)
    change = float((first[:, :-1].float() - second[:, :-1].float()).abs().max())
    if not change <= limit:
        raise UserError(
            f"{_name(backbone)} reads text in both directions: a later token changes an earlier state (by {change:.3g}); "
            "only decoders (GPT style) and encoder-decoders (T5 style) can be language models"
        )


def _require_padding_is_ignored(backbone: Backbone) -> None:
    """Require the same states for a row in a batch of one and in a batch with a longer row."""
    short, long = ([5, 6], [8, 9]), ([7, 5, 9, 3, 6], [4, 11, 3, 10])
    alone = _read(backbone, _rows(backbone, short[0]), _rows(backbone, short[1]))
    prompts, responses = _rows(backbone, short[0], long[0]), _rows(backbone, short[1], long[1])
    batch = _read(backbone, prompts, responses)
    refilled = _read(backbone, _refill_padding(prompts), _refill_padding(responses))
    limit = _tolerance(backbone, alone)
    change = float((alone[0].float() - batch[0][: len(alone[0])].float()).abs().max())
    if change <= limit:  # of equal shapes even bfloat16 should give equal bits, as in _require_causality
        limit *= 0.01
        change = float((refilled[0] - batch[0])[: len(alone[0])].float().abs().max())
    if not change <= limit:
        raise UserError(
            f"{_name(backbone)} reads padding: a text has different states alone than in a batch with a longer one (off by "
            f"{change:.3g}); this architecture is not supported"
        )


def _refill_padding(rows: Padded) -> Padded:
    return Padded(rows.ids.masked_fill(~length_mask(rows.lengths, rows.ids.shape[1]), int(rows.ids[0, 0])), rows.lengths)


def _read(backbone: Backbone, prompt: Padded, response: Padded) -> Tensor:
    """Return all outputs [B, ..] of a backbone for responses."""
    if isinstance(backbone, EncoderBackbone):
        return backbone.summary(prompt, response)
    return backbone.hidden(prompt, response)


def _require_own_logits(backbone: Backbone) -> None:
    """Require the logits of response tokens to equal the logits of the model's forward pass."""
    prompt, response = _rows(backbone, [5]), _rows(backbone, [6, 7, 8, 9])  # one token is a valid prompt for every model
    computed = backbone.logits(backbone.hidden(prompt, response))[:, :-1].float()
    if backbone.prompt_in_row:
        ids = torch.cat([prompt.ids, response.ids], dim=1)
        own = backbone.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    else:
        start = torch.full((1, 1), backbone.model.config.decoder_start_token_id, device=backbone.device)
        decoder_ids = torch.cat([start, response.ids[:, :-1]], dim=1)
        own = backbone.model(input_ids=prompt.ids, decoder_input_ids=decoder_ids, use_cache=False).logits.float()
    if not torch.allclose(computed, own, atol=_tolerance(backbone, own)):
        raise UserError(
            f"{_name(backbone)}: its logits are not a plain function of its last hidden state (off by "
            f"{float((computed - own).abs().max()):.3g}); this architecture is not supported"
        )


def _require_cache(backbone: Backbone) -> None:
    """Require token-by-token states, while rows leave the cache, to equal the states of full sequences."""
    prompt, response = _rows(backbone, [5, 6], [7, 5, 9, 3, 6]), _rows(backbone, [8, 9], [4, 11])
    whole = backbone.hidden(prompt, response)
    state, first = backbone.prefill(prompt)
    try:
        state.select(torch.zeros(1, dtype=torch.long, device=backbone.device))
    except AttributeError as error:  # recurrent states (Mamba) cannot give up single rows
        raise UserError(f"{_name(backbone)}: its cache cannot drop rows that ended; it is not supported") from error
    steps = torch.stack([backbone.decode_step(state, token) for token in response.ids[0, :, None]], dim=1)
    apart = (first - whole[:, 0], steps - whole[:1, 1:])
    change = max(float(difference.float().abs().max()) for difference in apart)
    if not change <= _tolerance(backbone, whole):
        raise UserError(
            f"{_name(backbone)}: a text that is read token by token, as in sampling, has other states than one that is read "
            f"at once (off by {change:.3g}); this architecture is not supported"
        )


def _can_share_prompts(backbone: Backbone) -> bool:
    """Return whether two responses in one row have the same states as in separate rows.

    With ALiBi they do not. In bfloat16 the model must also react to its positions: rounding exceeds the effect of ALiBi in a
    small or randomly initialized model.
    """
    if getattr(backbone.model.config, "window_size", None):  # GPT-Neo counts its local window in columns of the row
        return False
    prompt, responses = _rows(backbone, [5, 6, 7]), _rows(backbone, [8, 9, 4], [3, 5])
    prompt_of_response = torch.zeros(2, dtype=torch.long, device=backbone.device)
    try:
        separate = backbone.hidden(prompt, responses, prompt_of_response)
        backbone.shares_prompts = True
        packed = backbone.hidden(prompt, responses, prompt_of_response)
        other_first = backbone.hidden(prompt, _rows(backbone, [11, 12, 13], [3, 5]), prompt_of_response)
        if backbone.prompt_in_row and backbone.model.dtype != torch.float32:
            reverse = lambda _, args, given: (args, given | {"position_ids": given["position_ids"].flip(1)})  # noqa: E731
            hook = backbone.model.base_model.register_forward_pre_hook(reverse, with_kwargs=True)
            try:
                if torch.equal(backbone.hidden(prompt, responses, prompt_of_response), packed):
                    return False  # the tolerance hides the effect of ALiBi if states are large or attention is weak
            finally:
                hook.remove()
    except (ValueError, RuntimeError, TypeError, IndexError):
        return False
    finally:
        backbone.shares_prompts = False
    real = length_mask(responses.lengths + 1, separate.shape[1])
    bound = _tolerance(backbone, separate)
    if float((other_first[1] - packed[1])[: int(responses.lengths[1]) + 1].float().abs().max()) > 0.01 * bound:
        return False
    return torch.allclose(separate[real].float(), packed[real].float(), atol=bound)
