"""`align eval instructions`: how many answers obey their prompt's constraints, as far as a program can check them.

From a launcher: `accelerate launch align/eval/instructions/task.py --config FILE`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from align.core.errors import UserError
from align.core.launch import run_stage
from align.core.settings import option
from align.data.readers import read_records
from align.data.records import Prompt
from align.eval.core.answers import sample_answers
from align.eval.core.evaluated_models import open_accelerator, open_models
from align.eval.core.results import Evaluation, Figure, Json, publish, share_figure
from align.eval.core.settings import AnsweringTaskConfig
from align.eval.instructions.constraints import Constraint
from align.sampling.settings import PrimerSettings

TASK = "instructions"
SCORER = "checks by program"


@dataclass(kw_only=True)
class InstructionsConfig(PrimerSettings, AnsweringTaskConfig):
    """Prompts with a `check`, answered by each model; prompts without one are left out."""

    samples: int = option(4, "answers to each prompt", gt=0)


def run_instructions(config: InstructionsConfig) -> list[Evaluation]:
    """Let the models answer, check the answers, and write `instructions.json`.

    Raises:
        UserError: for a mistake in the settings or the data, or if no prompt has a check.
    """
    accelerator = open_accelerator(config)
    constraints = read_constraints(config.prompts, config.skip_bad_rows)
    evaluations = []
    for evaluated in open_models(config, accelerator):
        answers = sample_answers(config, TASK, evaluated, accelerator, config.samples, constraints)
        obeyed = {
            number: [constraints[number].obeyed_by(answer.text) for answer in drawn] for number, drawn in answers.items()
        }
        texts = {number: drawn[0].text for number, drawn in answers.items()}
        figures, tables = instruction_figures(constraints, obeyed)
        tables["First answers"] = [
            {"prompt": number, "check": _describe(constraints[number]), "obeyed": obeyed[number][0], "answer": texts[number]}
            for number in answers
        ]
        evaluations.append(Evaluation(TASK, evaluated.name, config.result_settings(), figures, tables))
    return publish(config, evaluations, accelerator)


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
        raise UserError(f"{path}: no prompt has a check; data/README.md says how one is written")
    return constraints


def instruction_figures(
    constraints: Mapping[str, Constraint], obeyed: Mapping[str, list[bool]]
) -> tuple[list[Figure], dict[str, list[Json]]]:
    """The share of answers that obey, with an interval over prompts, and a table of the kinds.

    Args:
        constraints: by the prompt's number.
        obeyed: for each prompt that was answered, whether each answer obeys.
    """
    shares = {number: sum(answers) / len(answers) for number, answers in obeyed.items()}
    nothing = "no prompt was answered"
    figure = share_figure("answers that obey", list(shares.values()), SCORER, nothing=nothing, better="higher")
    by_kind: dict[str, list[float]] = {}
    for number, share in shares.items():
        by_kind.setdefault(constraints[number].kind, []).append(share)
    table = [
        {"kind": kind, "prompts": len(of_kind), "answers that obey": round(sum(of_kind) / len(of_kind), 4)}
        for kind, of_kind in sorted(by_kind.items())
    ]
    return [figure], {"By kind of check": table}


def _describe(constraint: Constraint) -> str:
    return constraint.kind if constraint.value is None else f"{constraint.kind} {constraint.value}"


if __name__ == "__main__":
    run_stage(InstructionsConfig, run_instructions)
