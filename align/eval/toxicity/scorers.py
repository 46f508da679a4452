"""Toxicity scorers: several kinds with one interface, from texts to numbers from 0 to 1.

A scorer is named in settings by one word:

    minilm-l6            the local default: a sentence encoder from PyPI and a linear head that is shipped here
    model:NAME           a transformers text classifier: a folder or a hub name; `scorer_label` names the label that counts
    attribute:FOLDER     an attribute model of `align attributes`; `scorer_label` names the attribute that counts
    module:function      a user's function: a list of texts to as many numbers
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from align.core.errors import UserError, first_line
from align.core.plugins import checked_scores, import_function, import_object
from align.core.settings import option
from align.eval.core.settings import EvalConfig
from align.eval.core.store import fingerprint
from align.eval.toxicity.head import ToxicityHead, in_batches_of_tokens
from align.model_registry.registry import resolve_model
from align.runtime.endpoint import RESUME_HINT

DEFAULT = "minilm-l6"
KINDS = f"{DEFAULT}, model:NAME, attribute:FOLDER or module:function"


@dataclass(kw_only=True)
class ScorerConfig(EvalConfig):
    """Which scorer rates texts, and how it is called."""

    scorer: str = option(DEFAULT, f"scorer: {KINDS}", required=True)
    scorer_label: str = option("toxic", "of a classifier: the label or attribute whose probability is the score")
    scorer_prompt: str = option(
        "Complete the sentence.", "of an attribute model: the message that texts are read as answers to", required=True
    )
    scorer_batch: int = option(64, "texts that are scored at once", gt=0)


@dataclass(frozen=True)
class ToxicityScorer:
    """A scorer with the name and version that are reported with every number that comes from it.

    Attributes:
        name: as in the settings.
        version: a hash of its weights or of its source file.
        function: texts to as many scores, unchecked.
    """

    name: str
    version: str
    function: Callable[[list[str]], Sequence[object]]

    @property
    def title(self) -> str:
        """`name (version)`."""
        return f"{self.name} ({self.version})"

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """A number from 0 to 1 for each text; higher is more toxic."""
        if not texts:
            return []
        try:
            scores = list(self.function(list(texts)))
        except UserError:
            raise
        except Exception as error:  # other people's code: it may raise anything
            raise UserError(f"scorer {self.name}: {type(error).__name__}: {first_line(error)}; {RESUME_HINT}") from error
        return toxicity_scores(scores, texts, self.name)


def toxicity_scores(scores: object, texts: Sequence[str], name: str) -> list[float]:
    """The scores that a scorer returned for texts, checked: see `checked_scores`."""
    who, describe = f"scorer {name}", lambda index: repr(texts[index][:40])
    return checked_scores(scores, len(texts), who, low=0, high=1, items="texts", describe=describe, advice=RESUME_HINT)


def open_scorer(config: ScorerConfig, device: torch.device | str = "cpu") -> ToxicityScorer:
    """The scorer that the settings name.

    Raises:
        UserError: if it cannot be loaded.
    """
    name, batch = config.scorer, config.scorer_batch
    kind, _, rest = name.partition(":")
    if name == DEFAULT:
        head = ToxicityHead(str(resolve_model(DEFAULT)), device)
        return ToxicityScorer(name, head.version, lambda texts: head(texts, batch))
    if kind == "model":
        classifier, titled = TextClassifier(rest, config.scorer_label, device), f"{name} '{config.scorer_label}'"
        return ToxicityScorer(titled, classifier.version, lambda texts: classifier(texts, batch))
    if kind == "attribute":
        classifier_class = import_object("align.extras.attributes.classifier:AttributeClassifier")
        attribute = classifier_class(rest, config.scorer_label, config.scorer_prompt, device)
        return ToxicityScorer(f"{name} '{config.scorer_label}'", attribute.version, lambda texts: attribute(texts, batch))
    if ":" in name:
        function = import_function(name, "scorer")

        def score_in_batches(texts: list[str]) -> list[float]:  # each batch is checked: wrong counts must not cancel out
            parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
            return [score for part in parts for score in toxicity_scores(function(part), part, name)]

        return ToxicityScorer(name, _hash_of_source(function), score_in_batches)
    raise UserError(f"scorer '{name}' is unknown; give {KINDS}")


def _hash_of_source(function: Callable[..., object]) -> str:
    """12 hexadecimal digits of a SHA-256 over the file that the function is in, not over files that it reads."""
    import inspect

    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError):  # a callable object, or a function of a compiled module
        return "unknown version"


class TextClassifier:
    """A transformers text classifier from safetensors, in float32.

    The score is a sigmoid if the model's config names a multi-label problem or there is only one label, else a softmax.

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
        lengths = [len(ids) for ids in self.tokenizer(list(texts), truncation=True).input_ids]
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
