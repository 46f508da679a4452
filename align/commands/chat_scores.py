"""Figures of each token of an answer: its log-prob compared with a reference model, and a value after it."""

from dataclasses import dataclass

import torch

from align.commands.chat import ChatAnswer, Scorer, Speaker
from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.backbone import is_encoder
from align.models.heads import LanguageModel, RewardModel
from align.tokenization.encoded import SampledResponse


@dataclass(frozen=True)
class TokenFigures:
    """A number for each token of an answer.

    Attributes:
        texts: of the tokens; "" for a part of a character.
        values: as many numbers.
    """

    texts: list[str]
    values: list[float]


def require_comparable(speaker: Speaker, reference: Speaker) -> None:
    """Raise a UserError unless the reference reads the token ids of the model."""
    if not speaker.loaded.tokenization.reads_alike(reference.loaded.tokenization):
        raise UserError(
            f"reference {reference.name}: its tokenizer or chat template differs from that of {speaker.name}; give the "
            "initial policy of its training"
        )


@torch.no_grad()
def log_ratios(speaker: Speaker, reference: Speaker, answer: ChatAnswer) -> TokenFigures:
    """Return log pi(token) - log pi_ref(token) in nats at temperature 1; their sum is an estimate of the KL divergence."""
    prompt, response = Padded.from_lists([answer.prompt]), Padded.from_lists([answer.ids])
    models = [each.loaded.backbone for each in (speaker, reference)]
    ours, theirs = (LanguageModel(each)(prompt.to(each.device), response.to(each.device))[0].cpu() for each in models)
    return TokenFigures(speaker.loaded.tokenization.token_texts(answer.ids), (ours - theirs).tolist())


@torch.no_grad()
def token_values(speaker: Speaker, scorer: Scorer, answer: ChatAnswer) -> TokenFigures:
    """Return the reward of the answer up to each token, in the tokens of the reward model.

    Raises:
        UserError: if the reward model is an encoder, which reads an answer only as a whole, or has another kind of head.
    """
    reward = scorer.reward
    loaded, model = reward.loaded, reward.model
    if is_encoder(loaded.backbone.model.config) or not isinstance(model, RewardModel):
        raise UserError("value_model: it scores whole answers only; give a decoder or an encoder-decoder with one label")
    row = SampledResponse(answer.conversation, answer.prompt, answer.ids, answer.text, answer.ended)
    encoded = scorer.of(speaker).encode(row)
    device = loaded.backbone.device
    prompt, response = (Padded.from_lists([ids]).to(device) for ids in encoded)
    with loaded.backbone.adapter(model.adapter_name):
        hidden = loaded.backbone.hidden(prompt, response)
    values = model.head(hidden[0, 1:]) - reward.mean
    return TokenFigures(loaded.tokenization.token_texts(encoded.response), values.tolist())
