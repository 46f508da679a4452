"""Scoring with a classifier that another library saved, which transformers reads at its last token that is not padding."""

from typing import cast

import torch
from torch import Tensor, nn

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.models.backbone import Backbone, GatedLlama
from align.models.loading import LoadedModel
from align.models.roles import RewardModel, ScalarHead


class ForeignRewardModel(RewardModel):
    """A reward model that leaves out padding ids at the end of a text.

    Where padding is the token that ends a turn, such a model was trained on, and is read at, the token before the end.

    Args:
        pad_id: of the classifier's config.
    """

    def __init__(self, backbone: Backbone, head: ScalarHead, pad_id: int) -> None:
        super().__init__(backbone, head)
        self.pad_id = pad_id

    def forward(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Rewards [R] of R responses to N prompts; `prompt_index` [R] names each response's prompt."""
        written = [self._cut(ids) for ids in response.tolists()]
        device = response.ids.device
        if not all(written):  # the score of an empty response is that of its prompt, which is cut as well
            asked = prompt.tolists()
            owner = range(len(asked)) if prompt_index is None else prompt_index.tolist()
            read = [asked[n] if ids else self._cut(asked[n]) for n, ids in zip(owner, written, strict=True)]
            prompt, prompt_index = Padded.from_lists(read).to(device), None
        return super().forward(prompt, Padded.from_lists(written).to(device), prompt_index)

    def _cut(self, ids: list[int]) -> list[int]:
        """The ids up to the last one that is not padding."""
        end = next((place for place in range(len(ids), 0, -1) if ids[place - 1] != self.pad_id), 0)
        return ids[:end]


class GatedRewardModel(nn.Module):
    """A backbone whose attributes, read at the end of a response, are weighed by what was asked.

    The gate reads the state of the token before the opening of the answer: the end of the last message, which no template
    opens an answer without.

    Args:
        opening: token ids by which the template opens an answer.
    """

    def __init__(self, backbone: Backbone, opening: list[int]) -> None:
        super().__init__()
        self.backbone, self.opening = backbone, opening

    def forward(self, prompt: Padded, response: Padded, prompt_index: Tensor | None = None) -> Tensor:
        """Rewards [R] of R responses to N prompts; `prompt_index` [R] names each response's prompt."""
        prompts = prompt.tolists()
        ends = [last_place(ids, self.opening) for ids in prompts]
        owner = range(len(prompts)) if prompt_index is None else prompt_index.tolist()
        read = [ids[:end] for ids, end in zip(prompts, ends, strict=True)]
        written = [[*prompts[n][ends[n] :], *ids] for n, ids in zip(owner, response.tolists(), strict=True)]
        device = prompt.ids.device
        prompt, response = Padded.from_lists(read).to(device), Padded.from_lists(written).to(device)
        hidden = self.backbone.hidden(prompt, response, prompt_index)
        rows = torch.arange(len(written), device=device)
        return cast(GatedLlama, self.backbone.model).rewards(hidden[:, 0], hidden[rows, response.lengths])


def last_place(ids: list[int], part: list[int]) -> int:
    """Where `part` begins in `ids` for the last time, without its last token, which may join what follows it.

    Raises:
        UserError: if it is not there, behind another token.
    """
    part = part[:-1] or part
    places = (place for place in range(len(ids) - len(part), 0, -1) if ids[place : place + len(part)] == part)
    found = next(places, None)
    if found is None:
        raise UserError("the reward model's prompt was shortened, or does not open an answer as its chat template does")
    return found


def gated_reward_model(folder: str, loaded: LoadedModel) -> GatedRewardModel:
    """The reward model around what was loaded.

    Raises:
        UserError: if its template does not open an answer.
    """
    tokenization, asked = loaded.tokenization, user_turn("Hi")
    asking = tokenization.template_ids(tokenization.render(asked, generation_prompt=False))
    opening = tokenization.template_ids(tokenization.render(asked))[len(asking) :]
    if not opening:
        raise UserError(f"{folder}: its chat template does not open an answer, and its gate reads where that begins")
    return GatedRewardModel(loaded.backbone, opening)
