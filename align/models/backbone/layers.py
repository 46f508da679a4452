"""Which layers of a backbone a head reads."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from align.core.settings import ReadLayers

LAST = 4


class LayerFeatures(nn.Module):
    """A head's input, made of the states of all layers.

    Args:
        choice: `last_four` joins the states of the last four layers (frozen, BERT came to an F1 of 96.1 with them and of
            94.9 with the last alone: Devlin et al. 2018, arXiv 1810.04805, table 7); `mix` learns gamma sum_j s_j h_j over
            all layers and the embeddings, with s a softmax (ELMo: Peters et al. 2018, arXiv 1802.05365, equation 1).
        layers: of the model.
    """

    def __init__(self, choice: ReadLayers, layers: int) -> None:
        super().__init__()
        self.choice = choice
        if choice == "mix":
            self.weights, self.gamma = nn.Parameter(torch.zeros(layers + 1)), nn.Parameter(torch.ones(1))

    @property
    def width(self) -> int:
        """Its width, as a multiple of a state's."""
        return LAST if self.choice == "last_four" else 1

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """[.., H] of the embeddings and of each layer -> [.., width H]; a mix is float32."""
        if self.choice == "last_four":
            return torch.cat(list(states[-LAST:]), dim=-1)
        shares = torch.softmax(self.weights.float(), 0)
        mixed = torch.stack([share * state.float() for share, state in zip(shares, states, strict=True)]).sum(0)
        return self.gamma.float() * mixed


def layer_count(config: PreTrainedConfig, part: Literal["encoder", "decoder"]) -> int:
    """The layers of a model, or of one of its two halves."""
    named = (getattr(config, name, None) for name in (f"{part}_layers", f"num_{part}_layers"))
    return next((int(count) for count in named if count), int(config.num_hidden_layers))
