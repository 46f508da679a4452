"""A judge of answers: is this answer to this question true (or informative)? One number, by a linear head.

The head reads what a backbone makes of "Q: ...\\nA: ...\\nTrue:" (the mean of its states over the answer, and the last), the
words of the answer and their pairs, or both. Words alone are the baseline that a backbone has to beat: they know how true
answers are usually put, and no facts.
"""

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from align.batching import over_rows
from align.config import ModelConfig
from align.distributed import compute_dtype
from align.errors import UserError
from align.eval.judged_answers import WORDS
from align.files import new_folder, read_json, write_json
from align.models.backbone import Backbone
from align.models.checkpoint import finish_folder, save_adapter
from align.models.heads import ScalarHead
from align.models.loading import Loaded, load
from align.tensor_ops import Padded
from align.tokenization import Tokenization, first_line

HEAD, FACTS = "judge_head.safetensors", "judge.json"
BUCKETS = 1 << 16
"""Places that words and pairs of words are hashed into."""
ADAPTER = "judge"


class Read(NamedTuple):
    """A question and its answer as token ids; the word that asks for the verdict closes the answer."""

    prompt: list[int]
    response: list[int]


class WordBags(NamedTuple):
    """The words of R answers, end to end: their places, where each answer begins, and their weights."""

    places: Tensor
    starts: Tensor
    weights: Tensor

    @staticmethod
    def of(answers: Sequence[str]) -> "WordBags":
        """Words and pairs of neighbouring words, with marks for beginning and end; an answer's weights have norm 1."""
        found = []
        for answer in answers:
            words = ["<", *re.findall(r"\w+|[^\w\s]", answer.lower()), ">"]
            found.append({*words, *(f"{a} {b}" for a, b in zip(words, words[1:], strict=False))})
        sizes = torch.tensor([len(each) for each in found])
        places = [zlib.crc32(gram.encode()) % BUCKETS for each in found for gram in sorted(each)]
        return WordBags(
            torch.tensor(places),
            torch.cumsum(sizes, 0) - sizes,
            (1 / sizes.double().sqrt()).float().repeat_interleave(sizes),
        )


class JudgeModel(nn.Module):
    """The verdict's logit from a backbone's states, from words, or from both.

    Args:
        backbone: None: words alone.
        adapter: what the backbone computes with; None: as it is, frozen.
        words: whether words count.
    """

    centre: Tensor
    scale: Tensor

    def __init__(self, backbone: Backbone | None, adapter: str | None, words: bool) -> None:
        super().__init__()
        self.backbone, self.adapter_name = backbone, adapter
        width = 2 * backbone.hidden_size if backbone else 0
        self.head = ScalarHead(width, start_at_zero=True, bias=False) if backbone else None
        self.words = nn.EmbeddingBag(BUCKETS, 1, mode="sum") if words else None
        self.bias = nn.Parameter(torch.zeros(()))
        # Some dimensions of a state are a hundred times as large as others: they are brought to one scale.
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        if self.words is not None:
            nn.init.zeros_(self.words.weight)

    def states(self, prompt: Padded, response: Padded) -> Tensor:
        """[R, 2H] float32: the mean of the states after each response token, and the last of them."""
        assert self.backbone is not None
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response).float()
        rows, mask = torch.arange(len(response.lengths), device=hidden.device), response.mask()
        mean = (hidden[:, 1:] * mask[..., None]).sum(1) / response.lengths[:, None]
        return torch.cat([mean, hidden[rows, response.lengths]], dim=1)

    def forward(self, states: Tensor | tuple[Padded, Padded] | None, words: WordBags | None) -> Tensor:
        """Logits [R]; `states` may be what `states` gave, or prompts and responses to read."""
        logits = self.bias
        if self.head is not None:
            read = self.states(*states) if isinstance(states, tuple) else states
            assert read is not None
            logits = logits + self.head((read - self.centre) / self.scale)
        if self.words is not None and words is not None:
            logits = logits + self.words(*words[:2], per_sample_weights=words.weights)[:, 0]
        return logits


def read_answer(tokenization: Tokenization, question: str, answer: str, asks: str) -> Read:
    """What the backbone reads of an answer."""
    prompt, (response,) = tokenization.continuations(f"Q: {question}\nA:", [f" {answer}\n{WORDS[asks]}:"])  # type: ignore[index]
    return Read(prompt, response)


def padded(reads: Sequence[Read], device: torch.device) -> tuple[Padded, Padded]:
    """Prompts and responses of several answers."""
    prompts, responses = ([list(part) for part in parts] for parts in zip(*reads, strict=True))
    return Padded.from_lists(prompts).to(device), Padded.from_lists(responses).to(device)


@torch.no_grad()
def states_of(model: JudgeModel, reads: Sequence[Read], budget: int, accelerator: Accelerator) -> Tensor:
    """[N, 2H] on the CPU, the same on every process: computed once for a backbone that stays as it is."""

    def work(rows: list[int]) -> list[Tensor]:
        return list(model.states(*padded([reads[row] for row in rows], accelerator.device)).cpu())

    return torch.stack(over_rows([len(r.prompt) + len(r.response) for r in reads], budget, accelerator, work))


@dataclass(frozen=True)
class Judge:
    """A judge from disk.

    Attributes:
        name: what stands as the scorer beside its numbers: what it asks, a hash of its weights, and its held-out AUC.
    """

    model: JudgeModel
    tokenization: Tokenization | None
    facts: Mapping[str, Any]
    name: str

    @torch.no_grad()
    def probabilities(self, pairs: Sequence[tuple[str, str]], budget: int, accelerator: Accelerator) -> list[float]:
        """The probability of "yes" for each question and answer; the same on every process."""
        states = None
        if self.tokenization is not None:
            reads = [read_answer(self.tokenization, *pair, self.facts["asks"]) for pair in pairs]
            states = states_of(self.model, reads, budget, accelerator).to(accelerator.device)
        words = WordBags.of([answer for _, answer in pairs])
        logits = self.model(states, WordBags(*(column.to(accelerator.device) for column in words)))
        found: list[float] = torch.sigmoid(logits.double()).tolist()
        return found


def save_judge(folder: Path, model: JudgeModel, loaded: Loaded | None, facts: Mapping[str, Any]) -> None:
    """Save a judge, whole or not at all: its head, its adapter if it has one, and `judge.json`."""
    tensors = {name: value for name, value in model.state_dict().items() if not name.startswith("backbone.")}
    with new_folder(folder) as temporary:
        if loaded is not None and loaded.adapter is not None:
            save_adapter(temporary, loaded, loaded.adapter, loaded.backbone.model.state_dict())
            finish_folder(temporary, loaded, {"title": "Judge of answers", "stage": "judge", **facts})
        save_file({name: value.detach().float().cpu().contiguous() for name, value in tensors.items()}, temporary / HEAD)
        write_json(temporary / FACTS, dict(facts))


def load_judge(folder: str, asks: str, accelerator: Accelerator) -> Judge:
    """Load a judge, frozen.

    Raises:
        UserError: if the folder holds none, a broken one, or one that was trained for the other question.
    """
    path = Path(folder)
    if not (path / FACTS).exists():
        raise UserError(f"{folder}: not a judge ({FACTS} is missing); train one with `align eval train-judge`")
    facts = read_json(path / FACTS)
    if facts.get("asks") != asks:
        raise UserError(f"{folder}: this judge was trained for {facts.get('asks')}, not for {asks}")
    try:
        tensors = load_file(path / HEAD)
        model, tokenization = None, None
        if facts["model"] != "none":
            adapter = (path / "adapter_config.json").exists()
            settings = ModelConfig(model=folder if adapter else facts["model"], chat_template="raw")
            loaded = load(settings, compute_dtype(facts["dtype"]), layers=facts["layers"])
            model, tokenization = loaded.backbone, loaded.tokenization
        judge = JudgeModel(model, None, facts["words"])
        missing = judge.load_state_dict(tensors, strict=False)
        wrong = [*missing.unexpected_keys, *(key for key in missing.missing_keys if not key.startswith("backbone."))]
        if wrong:
            raise KeyError(wrong[0])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"{folder}: its {HEAD} or {FACTS} is broken ({first_line(error)}); train it again") from error
    digest = hashlib.sha256((path / HEAD).read_bytes()).hexdigest()[:12]
    name = f"{asks} judge {digest} on {facts['model']} (held-out AUC {facts['figures']['auc']:.2f})"
    judge.to(accelerator.device).eval().requires_grad_(False)
    return Judge(judge, tokenization, facts, name)


def binary_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log sigmoid over rows: of the logit for a yes, of its negative for a no."""
    return -nn.functional.logsigmoid(torch.where(labels, logits, -logits)).sum()
