"""`align eval instructions`: how many answers obey their prompt's constraints, as far as a program can check them.

A constraint checks whether an instruction was obeyed, not whether the answer is right. The idea is that of IFEval (Zhou et
al. 2023, arXiv 2311.07911); kinds and rules here are this project's own.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from align.core.errors import UserError, nearest_name_hint
from align.core.launch import run_stage
from align.core.settings import option
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.answers import open_accelerator, open_models, sample_answers
from align.eval.results import Evaluation, Measurement, publish, share_measurement
from align.eval.settings import EvalConfig, EvalPromptsConfig
from align.eval.store import Json
from align.sampling.settings import AnsweringConfig, FewShotConfig, InferenceConfig

TASK = "instructions"
SCORER = "checks by program"


@dataclass(kw_only=True)
class InstructionsConfig(FewShotConfig, EvalPromptsConfig, AnsweringConfig, EvalConfig, InferenceConfig):
    """Prompts with a `check`, answered by each model; prompts without one are left out."""

    samples: int = option(4, "answers to each prompt", gt=0)


def run_instructions(config: InstructionsConfig) -> list[Evaluation]:
    """Let the models answer, check the answers, and write `instructions.json`."""
    accelerator = open_accelerator(config.dtype)
    constraints = read_constraints(config.prompts, config.skip_bad_rows)
    evaluations = []
    for evaluated in open_models(config.models, config, accelerator):
        answers = sample_answers(config, TASK, evaluated, config.samples, constraints)
        obeyed = {
            number: [constraints[number].obeyed_by(answer.text) for answer in drawn] for number, drawn in answers.items()
        }
        measurements, tables = instruction_measurements(constraints, obeyed)
        tables["First answers"] = [
            {"prompt": number, "check": str(constraints[number]), "obeyed": obeyed[number][0], "answer": drawn[0].text}
            for number, drawn in answers.items()
        ]
        settings = config.result_settings() | evaluated.settings
        evaluations.append(Evaluation(TASK, evaluated.name, settings, measurements, tables))
    return publish(config, evaluations, accelerator)


@dataclass(frozen=True)
class Constraint:
    """A constraint on an answer: a kind of `KINDS`, and the number, the text or the texts that the kind needs."""

    kind: str
    value: Any = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = nearest_name_hint(self.kind, KINDS) or f"; use one of {', '.join(KINDS)}"
            raise UserError(f"check.kind is {self.kind!r}, which is unknown{hint}")
        expected, value = KINDS[self.kind][0], self.value
        fits = {
            NUMBER_ABOVE_0: type(value) is int and value > 0,
            TEXT: isinstance(value, str) and bool(value),
            TEXTS: isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value),
            NOTHING: value is None,
        }
        if not fits[expected]:
            raise UserError(f"check.value of {self.kind} is {value!r}; it has to be {expected}")

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind} {self.value}"

    @classmethod
    def from_row(cls, check: object) -> "Constraint":
        """Read a row's `check`, an object of `kind` and `value`; raises a `UserError` for anything else."""
        if not isinstance(check, Mapping) or not set(check) <= {"kind", "value"} or not isinstance(check.get("kind"), str):
            raise UserError(f"check is {check!r}, not an object of kind and value")
        return cls(**check)

    def obeyed_by(self, answer: str) -> bool:
        """Whether an answer obeys; an empty one never does."""
        return bool(answer.strip()) and KINDS[self.kind][1](answer, self.value)


def read_constraints(path: str, skip_bad_rows: bool = False) -> dict[str, Constraint]:
    """The constraint of each prompt that has one, by the prompt's number in the file, from 1.

    Raises:
        UserError: for a check that cannot be read, with the prompt's number, or if there is none.
    """
    constraints = {}
    for number, record in enumerate(read_records(path, Prompt, skip_bad_rows=skip_bad_rows), 1):
        if record.check is not None:
            try:
                constraints[str(number)] = Constraint.from_row(record.check)
            except UserError as error:
                raise UserError(f"{path}: prompt {number}: {error}") from error
    if not constraints:
        raise UserError(f"{path}: no prompt has a check; data/README.md describes them")
    return constraints


def instruction_measurements(
    constraints: Mapping[str, Constraint], obeyed: Mapping[str, list[bool]]
) -> tuple[list[Measurement], dict[str, list[Json]]]:
    """The share of answers that obey, with an interval over prompts, and a table of the kinds; by the prompt's number."""
    shares = {number: sum(answers) / len(answers) for number, answers in obeyed.items()}
    by_kind: dict[str, list[float]] = {}
    for number, share in shares.items():
        by_kind.setdefault(constraints[number].kind, []).append(share)
    table = [
        {"kind": kind, "prompts": len(of_kind), "answers that obey": round(sum(of_kind) / len(of_kind), 4)}
        for kind, of_kind in sorted(by_kind.items())
    ]
    nothing, values = "no prompt was answered", list(shares.values())
    measurement = share_measurement("answers that obey", values, SCORER, nothing=nothing, better="higher")
    return [measurement], {"By kind of check": table}


WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
"""A word: letters and digits, with apostrophes and hyphens inside."""
SENTENCE = re.compile(r"[^.!?]*[^\W_][^.!?]*(?:[.!?]+|$)")
"""A sentence: some letter or digit, up to a full stop, an exclamation or a question mark, or the end."""
BULLET, NUMBER = re.compile(r"[-*•]\s+\S"), re.compile(r"(\d+)[.)]\s+\S")
TRAILING = " \t\n.!?,;:\"'”’"


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return [word.lower() for word in WORD.findall(text)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _bare(text: str) -> str:
    return text.strip(TRAILING).lower()


def _has_commas(text: str, count: int) -> bool:
    return len(_lines(text)) == 1 and [bool(words(part)) for part in text.split(",")] == [True] * count


def _is_numbered(text: str, count: int) -> bool:
    numbers = [match and int(match[1]) for match in map(NUMBER.match, _lines(text))]
    return numbers == list(range(1, count + 1))


def _is_object(text: str, keys: list[str]) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and sorted(value) == sorted(keys)


def _has_words(text: str, wanted: list[str]) -> bool:
    found = f" {' '.join(words(text))} "
    return all(f" {' '.join(words(word))} " in found for word in wanted)


def _ends_with(text: str, ending: str) -> bool:
    text, ending = text.strip().lower(), ending.lower()
    return text.endswith(ending) or (ending[-1:].isalnum() and text.rstrip(TRAILING).endswith(ending))


NUMBER_ABOVE_0, TEXT, TEXTS, NOTHING = "a whole number above 0", "a text", "a list of texts", "left out"
KINDS: dict[str, tuple[str, Callable[[str, Any], bool]]] = {
    "word_count": (NUMBER_ABOVE_0, lambda text, count: len(words(text)) == count),
    "max_words": (NUMBER_ABOVE_0, lambda text, most: 0 < len(words(text)) <= most),
    "sentence_count": (NUMBER_ABOVE_0, lambda text, count: len(SENTENCE.findall(text)) == count),
    "line_count": (NUMBER_ABOVE_0, lambda text, count: len(_lines(text)) == count),
    "bullet_count": (NUMBER_ABOVE_0, lambda text, n: len(_lines(text)) == n and all(map(BULLET.match, _lines(text)))),
    "numbered_count": (NUMBER_ABOVE_0, _is_numbered),
    "comma_count": (NUMBER_ABOVE_0, _has_commas),
    "without_letter": (TEXT, lambda text, letter: bool(words(text)) and letter.lower() not in text.lower()),
    "without_word": (TEXT, lambda text, word: bool(words(text)) and word.lower() not in words(text)),
    "starts_with": (TEXT, lambda text, start: text.strip().lower().startswith(start.lower())),
    "ends_with": (TEXT, _ends_with),
    "one_of": (TEXTS, lambda text, allowed: _bare(text) in map(_bare, allowed)),
    "contains": (TEXTS, _has_words),
    "json": (TEXTS, _is_object),
    "number": (NOTHING, lambda text, _: bool(re.fullmatch(r"[-−]?\d+(?:[.,]\d+)*", text.strip().rstrip(".!")))),
    "lowercase": (NOTHING, lambda text, _: any(map(str.isalpha, text)) and text == text.lower()),
    "uppercase": (NOTHING, lambda text, _: any(map(str.isalpha, text)) and text == text.upper()),
}
"""By kind, what its value has to be, and whether an answer obeys."""


if __name__ == "__main__":
    run_stage(InstructionsConfig, run_instructions)
