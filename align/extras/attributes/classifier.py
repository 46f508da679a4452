"""An attribute of `align attributes` as a classifier of single texts: the toxicity scorer `attribute:FOLDER`."""

from collections.abc import Sequence

import torch

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.eval.store import fingerprint
from align.extras.attributes.model import form_of, heads_of, in_label_units, load_attribute_model


class AttributeClassifier:
    """The probability of a yes-or-no attribute of a text.

    Computed in float32: the batch does not change the scores.

    Args:
        folder: an attribute model with heads.
        attribute: the name of a binary head.
        prompt: the message that every text is read as the answer to: such a model reads pairs.
        device: where the model runs.

    Raises:
        UserError: if it is no such model, or has no such head.
    """

    def __init__(self, folder: str, attribute: str, prompt: str, device: torch.device | str) -> None:
        self.name = f"scorer attribute:{folder}"
        if form_of(folder) != "heads":
            raise UserError(f"{self.name} is of the generative form; name an attribute model with heads")
        names = [head.name for head in heads_of(folder) if head.kind == "binary"]
        if attribute not in names:
            has = ", ".join(names) or "none"
            raise UserError(f"{self.name} has no yes-or-no attribute '{attribute}'; set scorer_label to one it has: {has}")
        model, self.loaded = load_attribute_model(folder, "float32")
        self.model, self.device = model.to(device), torch.device(device)
        self.index = [head.name for head in model.heads].index(attribute)
        self.version = f"{fingerprint(folder)}, after {prompt!r}"
        self.conversation = user_turn(prompt)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[float]:
        """The attribute's probability for each text.

        Raises:
            UserError: if a text is longer than the model can read.
        """
        prompt, responses = self.loaded.tokenization.answers_ids(self.conversation, texts, whole=False)
        for text, ids in zip(texts, responses, strict=True):
            self.loaded.backbone.require_fit(len(prompt), len(ids), f"{self.name}: the text {text[:40]!r}")
        prompts = Padded.from_lists([prompt] * len(responses)).to(self.device)
        outputs = self.model(prompts, Padded.from_lists(responses).to(self.device))
        scores: list[float] = in_label_units(outputs.double(), self.model.heads)[:, self.index].tolist()
        return scores
