"""Rules and judgments: rule files, means over labelers, metrics, and scoring with a rule model."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from align.batches.encoding import Data, Limits, OverlongCounts, encode_response, records_of
from align.core.errors import UserError, nearest_name_hint
from align.core.files import read_json, resolve_path
from align.core.seeds import RngStream, generator
from align.core.settings import Settings, option
from align.core.statistics import calibration_error, roc_auc
from align.data.conversation import to_json
from align.data.records import Conversation, RuleJudgment
from align.models.loading import LoadedModel
from align.reward.checkpoint import RULE, require_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization import Tokenization
from align.tokenization.encoded import EncodedJudgments, PromptResponse, SampledResponse

RULE_FORM = "\nRule: {text}\nVerdict:"
"""Text after the response. The head's input is the hidden state of its last token."""
TINY = 1e-12


@dataclass(frozen=True)
class JudgedResponse:
    """A response with the mean judgment over labelers, by name.

    For a rule, it is the fraction of labelers who saw a violation; for an attribute, the mean of its values.
    """

    prompt: Conversation
    response: str
    targets: Mapping[str, float]

    @property
    def conversation(self) -> str:
        """Equal for responses to the same conversation."""
        return str(to_json(self.prompt))


class SplitJudgments(NamedTuple):
    """Judged responses for training, of held-out conversations, and by held-out rules."""

    train: list[JudgedResponse]
    validation: list[JudgedResponse]
    unseen: list[JudgedResponse]


def mean_judgments(judgments: Iterable[tuple[Conversation, str, str, float | None]]) -> list[JudgedResponse]:
    """Average the judgments of each response, given as prompt, response, name and value, in the order of its first one.

    None is an undecided labeler and is ignored. A response without a value is left out.
    """
    values: dict[tuple[str, str], tuple[Conversation, dict[str, list[float]]]] = {}
    for prompt, response, name, value in judgments:
        _, by_name = values.setdefault((str(to_json(prompt)), response), (prompt, {}))
        decided = by_name.setdefault(name, [])
        if value is not None:
            decided.append(value)
    means = []
    for (_, response), (prompt, by_name) in values.items():
        targets = {name: sum(decided) / len(decided) for name, decided in by_name.items() if decided}
        if targets:
            means.append(JudgedResponse(prompt, response, targets))
    return means


def collect_judgments(records: Sequence[RuleJudgment]) -> list[JudgedResponse]:
    """Return each response with the fraction of `violates` among decided verdicts, by rule."""
    value = {"violates": 1.0, "follows": 0.0}
    counted = without_overruled(records)
    return mean_judgments((row.prompt, row.response, row.rule, value.get(row.verdict)) for row in counted)


def without_overruled(records: Sequence[RuleJudgment]) -> list[RuleJudgment]:
    """Drop overruled verdicts, and labelers' verdicts on responses and rules that a lead decided."""

    def asked(row: RuleJudgment) -> tuple[str, str, str]:
        return str(to_json(row.prompt)), row.response, row.rule

    decisions = {asked(row): row for row in records if row.decision and not row.overruled}
    return [row for row in records if not row.overruled and decisions.get(asked(row), row) is row]


def read_judgments(data: Data, skip_bad_rows: bool, rules: Mapping[str, str], files: Sequence[str]) -> list[JudgedResponse]:
    """Read judged responses from a file or from records in memory.

    Args:
        rules: rule text by id.
        files: files of the rules, for error messages.

    Raises:
        UserError: if a row is invalid, a rule has no text, or every verdict is unsure.
    """
    records = list(records_of(data, RuleJudgment, skip_bad_rows))
    source = data if isinstance(data, str) else "rule judgments in memory"
    unknown = sorted({record.rule for record in records} - rules.keys())
    if unknown:
        raise UserError(f"{source}: rule '{unknown[0]}' is not in {', '.join(files)}; add its file to rules")
    judged = collect_judgments(records)
    if not judged:
        raise UserError(f"{source}: no decided rule judgments (violates or follows)")
    return judged


def split_judgments(
    judged: Sequence[JudgedResponse], held_out_rules: Sequence[str], share: float, seed: int
) -> SplitJudgments:
    """Hold out rules, and a fraction of conversations with all their responses. At least one conversation remains."""
    conversations = list(dict.fromkeys(item.conversation for item in judged))
    count = min(len(conversations) - 1, round(share * len(conversations))) if conversations else 0
    drawn = generator(seed, RngStream.HELD_OUT_CONVERSATIONS).permutation(len(conversations))[:count].tolist()
    held_out = {conversations[number] for number in drawn}
    split = SplitJudgments([], [], [])
    for item in judged:
        parts = (split.validation if item.conversation in held_out else split.train), split.unseen
        for part, unseen in zip(parts, (False, True), strict=True):
            targets = {rule: target for rule, target in item.targets.items() if (rule in held_out_rules) is unseen}
            if targets:
                part.append(replace(item, targets=targets))
    return split


def rule_ids(tokenization: Tokenization, text: str) -> list[int]:
    """Tokenize a rule as it follows the response."""
    return tokenization.response_ids(RULE_FORM.format(text=text))


def encoded_responses(
    judged: Sequence[JudgedResponse], loaded: LoadedModel, limits: Limits, kind: str
) -> Iterator[tuple[str, PromptResponse, JudgedResponse]]:
    """Yield responses within the limits: a name for errors, token ids, and the judgments, named `kind`."""
    counts = OverlongCounts(limits)
    for number, item in enumerate(judged, start=1):
        where = f"judged response {number} ({item.response[:40]!r})"
        encoded = encode_response(item.prompt, item.response, loaded, limits, where, counts)
        if encoded is not None:
            yield where, encoded, item
    counts.report(kind, "judged response")


def encode_judgments(
    judged: Sequence[JudgedResponse], rules: Mapping[str, str], loaded: LoadedModel, limits: Limits
) -> list[EncodedJudgments]:
    """Return judged responses within the limits, each with all of its rules.

    Raises:
        UserError: if a text exceeds the limits or the model's context length.
    """
    ids_of_rule = {rule: rule_ids(loaded.tokenization, text) for rule, text in rules.items()}
    found = []
    for where, encoded, item in encoded_responses(judged, loaded, limits, "rule judgments"):
        read = [*encoded.prompt, *encoded.response]
        responses = [ids_of_rule[rule] for rule in item.targets]
        loaded.backbone.require_fit(len(read), max(map(len, responses)), where)
        found.append(EncodedJudgments(read, responses, tuple(item.targets), tuple(item.targets.values())))
    return found


class ScoredJudgment(NamedTuple):
    """The model's probability of a violation, and the fraction of labelers who found one."""

    rule: str
    probability: float
    target: float


def rule_metrics(scored: Sequence[ScoredJudgment]) -> dict[str, float]:
    """Compute all metrics of a rule model, which docs/metrics.md defines.

    AUC and balanced accuracy need responses of both classes, and are left out for rules with only one. A target of exactly
    one half belongs to neither class.
    """
    rules = sorted({item.rule for item in scored})
    per_rule = {rule: _metrics([item for item in scored if item.rule == rule]) for rule in rules}
    metrics = _metrics(scored)
    for name in ("auc", "balanced_accuracy", "calibration_error"):
        known = [found[name] for found in per_rule.values() if name in found]
        if known:  # macro average over rules
            metrics[name] = sum(known) / len(known)
        else:
            metrics.pop(name, None)
    for rule, found in per_rule.items():
        metrics |= {f"rule/{rule}/{name}": value for name, value in found.items()}
    return metrics


def _metrics(items: Sequence[ScoredJudgment]) -> dict[str, float]:
    predicted = np.array([item.probability for item in items])
    target = np.array([item.target for item in items])
    clipped = predicted.clip(TINY, 1 - TINY)
    metrics = {
        "loss": float(-(target * np.log(clipped) + (1 - target) * np.log1p(-clipped)).mean()),
        "judgments": float(len(items)),
        "violated": float(target.mean()),
        "calibration_error": calibration_error(predicted, target),
    }
    decided = target != 0.5
    violated, predicts_violation = target[decided] > 0.5, predicted[decided] > 0.5
    if violated.any() and not violated.all():
        metrics["auc"] = roc_auc(predicted[decided], violated)
        shares = predicts_violation[violated].mean(), (~predicts_violation[~violated]).mean()
        metrics["balanced_accuracy"] = float(sum(shares) / 2)
    return metrics


@dataclass(kw_only=True)
class RuleModelSettings(Settings):
    """Rule model and the rules that it judges."""

    model: str = option("", "Rule model folder (trained by `align rules`).", required=True)
    rules: list[str] = option(
        [], "Rules to judge: rule files, FILE:ID, or ids of training rules. Default: all training rules."
    )


def rules_of_model(folder: str, wanted: Sequence[str] = ()) -> dict[str, str]:
    """Return the rules that a rule model judges, by id. `wanted` is as in `RuleModelSettings`.

    Raises:
        UserError: if the folder is not a rule model, or a rule is unknown.
    """
    require_reward_model(folder, RULE)
    trained = read_json(Path(folder) / RULE.metadata_file)["rules"]
    return choose_rules(wanted, trained, f"{folder}: among the model's training rules")


class RuleScorer:
    """A rule model with a set of rules, given as text by id. Each response is encoded once for all rules.

    Args:
        scorer: scorer that computes the model's logit of a violation.
        tokenization: the model's tokenization.
    """

    def __init__(self, scorer: RewardModelScorer, rules: Mapping[str, str], tokenization: Tokenization) -> None:
        self.scorer, self.rules = scorer, dict(rules)
        self._ids = [rule_ids(tokenization, text) for text in self.rules.values()]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each rule."""
        return tuple(map(len, self._ids))

    def __call__(self, responses: Sequence[SampledResponse]) -> Tensor:
        """Return P(response violates rule), [rules, responses] float32. Identical on every process."""
        encoded = [self.scorer.encode(response) for response in responses]
        rows = [PromptResponse([*row.prompt, *row.response], rule) for row in encoded for rule in self._ids]
        logits = torch.tensor(self.scorer.score_rows(rows), dtype=torch.float64)
        return torch.sigmoid(logits).float().reshape(len(encoded), len(self._ids)).T


# ------------------------------------------- files of rules, as in forms/rules: an id, which judgments name, and a text

_RULES_FILE = re.compile(r"(?P<file>.+\.ya?ml)(:(?P<rule>[^/\\:]+))?", re.IGNORECASE)


def read_rules(paths: Sequence[str]) -> dict[str, str]:
    """Return rule text by id, from files as in forms/rules, or `FILE:ID` for one rule of a file."""
    return _merge(map(_read, paths))


def choose_rules(wanted: Sequence[str], known: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the rules that a setting names by file, `FILE:ID` or an id in `known`. Default: all of `known`.

    `where` names `known` in an error.
    """
    if not wanted:
        return dict(known)
    return _merge(
        _read(word) if _RULES_FILE.fullmatch(word) else (word, {word: _text_of(word, known, where)}) for word in wanted
    )


def _merge(parts: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for source, rules in parts:
        for rule, text in rules.items():
            if rule in texts:
                raise UserError(f"{source}: rule '{rule}' is defined twice")
            texts[rule] = text
    return texts


def _text_of(rule: str, known: Mapping[str, str], where: str) -> str:
    if rule not in known:
        raise UserError(f"{where}: no rule '{rule}'{nearest_name_hint(rule, known) or ''}")
    return known[rule]


def _read(path: str) -> tuple[str, dict[str, str]]:
    single = _RULES_FILE.fullmatch(path)
    file = single["file"] if single else path
    try:
        stored = yaml.safe_load(resolve_path(file).read_text(encoding="utf-8"))
        rules = [(str(rule["id"]), str(rule["text"])) for rule in stored["rules"]]
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a rule file; it needs a list `rules` of entries with id and text") from error
    found = _merge((file, {rule: text}) for rule, text in rules)
    if single and single["rule"]:
        found = {single["rule"]: _text_of(single["rule"], found, file)}
    return file, found
