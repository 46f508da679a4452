"""Any text classifier of transformers, run on batches of texts of similar length."""

import math
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from align.builtin.zoo import resolve_model
from align.core.errors import UserError, first_line
from align.core.tensor_ops import cut_by_tokens
from align.eval.core.fingerprints import fingerprint


class TextClassifier:
    """A transformers text classifier from safetensors, in float32.

    Args:
        model: a folder, a built-in model or a hub name.
        label: the label whose probability is the score: a sigmoid if the model's config says multi-label or there is only
            one label, else a softmax over all labels.
        device: where the model runs.

    Raises:
        UserError: if it cannot be loaded, or has no such label.
    """

    def __init__(self, model: str, label: str, device: torch.device | str) -> None:
        self.model, self.tokenizer = load_classifier(model, device)
        labels = {str(name).lower(): int(index) for index, name in (self.model.config.id2label or {}).items()}
        if label.lower() not in labels:
            raise UserError(f"scorer model:{model} has no label '{label}'; set scorer_label to one of {', '.join(labels)}")
        self.index = labels[label.lower()]
        multi_label = self.model.config.problem_type == "multi_label_classification" or len(labels) == 1
        self.activation = torch.sigmoid if multi_label else (lambda logits: logits.softmax(-1))
        commit = getattr(self.model.config, "_commit_hash", None)
        self.version = fingerprint(str(resolve_model(model))) or str(commit)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch: int) -> list[float]:
        """The label's probability for each text; a text that is too long for the model is truncated."""
        lengths = text_lengths(self.tokenizer, texts)
        return in_batches_of_tokens(lengths, batch, lambda rows: self._score([texts[row] for row in rows]))

    def _score(self, texts: list[str]) -> list[float]:
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        logits = self.model(**inputs.to(self.model.device)).logits.float()
        scores: list[float] = self.activation(logits)[:, self.index].tolist()
        return scores

    @property
    def max_tokens(self) -> int:
        """How many tokens the classifier can read; 512 if it states no limit."""
        return min(self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", None) or 512)


def load_classifier(model: str, device: torch.device | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A classifier and its tokenizer, frozen.

    Raises:
        UserError: if there is none, the weights of its head are missing, or it exists as pickle only.
    """
    source = str(resolve_model(model))
    try:
        classifier, report = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"scorer model:{model} cannot be loaded as a text classifier ({first_line(error)}); check the folder or hub name"
        ) from error
    if report["missing_keys"]:  # transformers would draw them at random
        raise UserError(
            f"scorer model:{model} is not a text classifier: it has no weight '{min(report['missing_keys'])}'; name another"
        )
    return classifier.to(device).eval().requires_grad_(False), tokenizer


def text_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Tokens of each text that a model with this tokenizer reads."""
    return [len(ids) for ids in tokenizer(list(texts), truncation=True).input_ids]


def in_batches_of_tokens(lengths: Sequence[int], batch: int, score: Callable[[list[int]], list[float]]) -> list[float]:
    """Score texts of similar length together, at most `batch` at once.

    Args:
        lengths: tokens of each text [N].
        score: the scores of some texts, by their rows.

    Returns:
        Scores in the order of the texts [N].
    """
    scores = [math.nan] * len(lengths)
    for rows in cut_by_tokens(lengths, batch * max(lengths), batch):
        for row, value in zip(rows, score(rows), strict=True):
            scores[row] = value
    return scores
