"""Scoring with a classifier that another library saved, which transformers reads at its last token that is not padding."""

from torch import Tensor

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
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
