"""From people's verdicts to what a rule model learns from: shares of labelers, and token ids that put the rule last."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from align.batches.encoding import Data, Limits, encode_response, records_of
from align.batches.limits import OverlongCounts
from align.core.errors import UserError
from align.core.seeds import Stream, generator
from align.core.statistics import calibration_error, roc_auc
from align.data.conversation import to_json
from align.data.records import Conversation, RuleJudgment
from align.models.loading import LoadedModel
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedJudgments

RULE_FORM = "\nRule: {text}\nVerdict:"
"""What follows the response; the head reads the state of its last token."""


@dataclass(frozen=True)
class JudgedResponse:
    """A response with the share of labelers who saw each rule violated, by the rule's id."""

    prompt: Conversation
    response: str
    targets: Mapping[str, float]

    @property
    def conversation(self) -> str:
        """Equal for responses to the same conversation."""
        return str(to_json(self.prompt))


class SplitJudgments(NamedTuple):
    """Judged responses by their purpose."""

    train: list[JudgedResponse]
    validation: list[JudgedResponse]
    """Held-out conversations, by the rules that are trained on."""
    unseen: list[JudgedResponse]
    """All conversations, by the rules that are held out."""


def collect_judgments(records: Sequence[RuleJudgment]) -> list[JudgedResponse]:
    """Every response with its targets, in the order of the records.

    A target is the share of `violates` among the verdicts other than `unsure`. A rule with no such verdict is left out, and
    so is a response without any other rule.
    """
    votes: dict[tuple[str, str], dict[str, list[bool]]] = {}
    first: dict[tuple[str, str], RuleJudgment] = {}
    for record in records:
        key = (str(to_json(record.prompt)), record.response)
        first.setdefault(key, record)
        decided = votes.setdefault(key, {}).setdefault(record.rule, [])
        if record.verdict != "unsure":
            decided.append(record.verdict == "violates")
    found = []
    for key, by_rule in votes.items():
        targets = {rule: sum(decided) / len(decided) for rule, decided in by_rule.items() if decided}
        if targets:
            found.append(JudgedResponse(first[key].prompt, first[key].response, targets))
    return found


def read_judgments(data: Data, skip_bad_rows: bool, rules: Mapping[str, str], files: Sequence[str]) -> list[JudgedResponse]:
    """Judged responses from a file or from records in memory.

    Args:
        rules: texts by id.
        files: where the rules are from, for an error.

    Raises:
        UserError: for a bad row, a rule without a text, or if nobody decided anything.
    """
    records = list(records_of(data, RuleJudgment, skip_bad_rows))
    source = data if isinstance(data, str) else "rule judgments in memory"
    unknown = sorted({record.rule for record in records} - rules.keys())
    if unknown:
        raise UserError(f"{source}: rule '{unknown[0]}' is in none of {', '.join(files)}; name its file in rules")
    judged = collect_judgments(records)
    if not judged:
        raise UserError(f"{source}: no rule judgment in it that decides (violates or follows)")
    return judged


def draw_conversations(conversations: Sequence[str], share: float, seed: int) -> set[str]:
    """A share of the different conversations, to be held out with all of their judgments; never all conversations."""
    different = list(dict.fromkeys(conversations))
    count = min(len(different) - 1, round(share * len(different))) if different else 0
    drawn = generator(seed, Stream.HELD_OUT_CONVERSATIONS).permutation(len(different))[:count].tolist()
    return {different[number] for number in drawn}


def split_judgments(
    judged: Sequence[JudgedResponse], held_out_rules: Sequence[str], share: float, seed: int
) -> SplitJudgments:
    """Hold out rules, and a share of the conversations with all of their responses.

    Args:
        share: of the conversations; 0 holds out none.
        seed: of the draw.
    """
    held_out = draw_conversations([item.conversation for item in judged], share, seed)
    split = SplitJudgments([], [], [])
    for item in judged:
        seen = {rule: target for rule, target in item.targets.items() if rule not in held_out_rules}
        unseen = {rule: target for rule, target in item.targets.items() if rule in held_out_rules}
        if unseen:
            split.unseen.append(JudgedResponse(item.prompt, item.response, unseen))
        if seen:
            part = split.validation if item.conversation in held_out else split.train
            part.append(JudgedResponse(item.prompt, item.response, seen))
    return split


def rule_ids(tokenization: Tokenization, text: str) -> list[int]:
    """The token ids that a rule model reads after a response.

    Raises:
        SpecialTokenError: if the text spells a special token.
    """
    return tokenization.response_ids(RULE_FORM.format(text=text))


def encode_judgments(
    judged: Sequence[JudgedResponse], rules: Mapping[str, str], loaded: LoadedModel, limits: Limits
) -> list[EncodedJudgments]:
    """Judged responses within the limits, each with all of its rules.

    Raises:
        UserError: if a text exceeds the limits or what the model can read.
    """
    backbone = loaded.backbone
    counts = OverlongCounts(limits)
    ids_of_rule = {rule: rule_ids(loaded.tokenization, text) for rule, text in rules.items()}

    def encoded() -> Iterator[EncodedJudgments]:
        for number, item in enumerate(judged, start=1):
            where = f"judged response {number} ({item.response[:40]!r})"
            kept = encode_response(item.prompt, item.response, loaded, limits, where, counts)
            if kept is None:
                continue
            backbone.require_fit(
                len(kept.prompt) + len(kept.response), max(len(ids_of_rule[rule]) for rule in item.targets), where
            )
            responses = [ids_of_rule[rule] for rule in item.targets]
            yield EncodedJudgments(
                [*kept.prompt, *kept.response], responses, tuple(item.targets), tuple(item.targets.values())
            )

    found = list(encoded())
    counts.report("rule judgments", "judged response")
    return found


TINY = 1e-12


@dataclass(frozen=True)
class ScoredJudgment:
    """The verdicts of a model and of people on one response under one rule.

    Attributes:
        rule: its id.
        probability: that the response violates the rule, by the model.
        target: the share of labelers who saw it violated.
    """

    rule: str
    probability: float
    target: float


def rule_metrics(scored: Sequence[ScoredJudgment]) -> dict[str, float]:
    """All metrics of a rule model; docs/metrics.md defines each.

    AUC and balanced accuracy need responses of both kinds, and are left out for a rule that has only one. A target of
    exactly one half is neither kind.
    """
    by_rule: dict[str, list[ScoredJudgment]] = {}
    for item in scored:
        by_rule.setdefault(item.rule, []).append(item)
    per_rule = {rule: _figures(items) for rule, items in sorted(by_rule.items())}
    metrics = _figures(scored)
    for name in ("auc", "balanced_accuracy", "calibration_error"):
        known = [figures[name] for figures in per_rule.values() if name in figures]
        if known:  # a mean over rules, which count alike, however often each was judged
            metrics[name] = sum(known) / len(known)
        else:
            metrics.pop(name, None)
    for rule, figures in per_rule.items():
        metrics |= {f"rule/{rule}/{name}": value for name, value in figures.items()}
    return metrics


def _figures(items: Sequence[ScoredJudgment]) -> dict[str, float]:
    predicted = np.array([item.probability for item in items])
    target = np.array([item.target for item in items])
    clipped = predicted.clip(TINY, 1 - TINY)
    figures = {
        "loss": float(-(target * np.log(clipped) + (1 - target) * np.log1p(-clipped)).mean()),
        "judgments": float(len(items)),
        "violated": float(target.mean()),
        "calibration_error": calibration_error(predicted, target),
    }
    decided = target != 0.5
    violated, predicts_violation = target[decided] > 0.5, predicted[decided] > 0.5
    if violated.any() and not violated.all():
        figures["auc"] = roc_auc(predicted[decided], violated)
        figures["balanced_accuracy"] = float(
            (predicts_violation[violated].mean() + (~predicts_violation[~violated]).mean()) / 2
        )
    return figures
