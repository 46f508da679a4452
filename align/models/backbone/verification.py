"""What a freshly wrapped model must show on a few tokens before anything is trusted to it."""

import torch

from align.errors import UserError
from align.models.backbone.contract import Backbone
from align.tensor_ops import Padded, length_mask


@torch.no_grad()
def verify(backbone: Backbone) -> bool:
    """Compare a backbone with its model's own forward; gives whether responses may share a row with their prompt.

    Raises:
        UserError: if the architecture computes its logits in a way that the backbone does not reproduce, or keeps a cache
            that rows cannot leave.
    """
    model = backbone.model
    was_training = model.training
    model.eval()
    prompt = _tokens(backbone, [[5, 6, 7]])
    # bfloat16 keeps 8 bits: products summed in another order differ by a few units in the last place.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    if model.get_output_embeddings() is not None:  # a classifier has none: it is read, never sampled from
        _require_plain_logits(backbone, prompt, tolerance)
        _require_cache(backbone, prompt)
    shares = _accepts_shared_prompts(backbone, prompt, tolerance)
    model.train(was_training)
    return shares


def _tokens(backbone: Backbone, rows: list[list[int]]) -> Padded:
    size = backbone.model.config.vocab_size
    return Padded.from_lists([[token % size for token in row] for row in rows]).to(backbone.device)


def _require_plain_logits(backbone: Backbone, prompt: Padded, tolerance: float) -> None:
    one = _tokens(backbone, [[8, 9]])
    ours, theirs = backbone.logits(backbone.hidden(prompt, one))[:, :-1].float(), backbone.plain_logits(prompt, one).float()
    if not torch.allclose(ours, theirs, atol=tolerance * max(1.0, theirs.abs().max().item())):
        raise UserError(
            f"model type '{backbone.model.config.model_type}': its logits are not a plain function of its last hidden "
            f"state (off by {(ours - theirs).abs().max().item():.3g}); this architecture is not supported"
        )


def _require_cache(backbone: Backbone, prompt: Padded) -> None:
    """Sampling takes rows out of the cache when they end; recurrent states (Mamba) know no rows to take out."""
    try:
        backbone.start(prompt)[0].select(torch.zeros(1, dtype=torch.long, device=backbone.device))
    except AttributeError as error:
        name = backbone.model.config.model_type
        raise UserError(f"model type '{name}': its cache cannot drop rows that ended; it is not supported") from error


def _accepts_shared_prompts(backbone: Backbone, prompt: Padded, tolerance: float) -> bool:
    """Two responses in one row must give the states of two rows, behind a cached prefix too; with ALiBi they do not."""
    if getattr(backbone.model.config, "window_size", None):  # GPT-Neo counts its local window in columns of the row
        return False
    two = _tokens(backbone, [[8, 9, 4], [3, 5]])
    owner = torch.zeros(2, dtype=torch.long, device=backbone.device)
    apart = backbone.hidden(prompt, two, owner)
    backbone.shares_prompts = True
    try:
        together = backbone.hidden(prompt, two, owner)
        behind = backbone.hidden(Padded(prompt.ids[:, 1:], prompt.lengths - 1), two, owner, prompt.ids[0, :1].tolist())
    except (ValueError, RuntimeError, TypeError, IndexError):
        return False
    finally:
        backbone.shares_prompts = False
    real = length_mask(two.lengths + 1, apart.shape[1])
    bound = tolerance * max(1.0, apart.abs().max().item())
    return all(torch.allclose(apart[real].float(), states[real].float(), atol=bound) for states in (together, behind))
