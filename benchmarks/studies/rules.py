"""From judgments to a policy that violates fewer rules: the study whose figures docs/rules.md quotes.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.rules --sft runs/demo/sft/model --reward runs/demo/reward/model \
        [--control runs/demo/ppo/model] [--seeds 0 1 2] [--steps judge rules ppo answers report]

Conversations are cut in two halves that share nothing. A rule model of each seed learns from one half, and PPO from it
and from the reward model; the judge of all policies, a rule model of another seed, learns from the other half. The rule
that a program can check is counted by the program. Every step that is finished is not done again, so a run that was
broken off goes on where it stopped, also within a stage. Answers, figures and a shuffled table for a reader who does not
know which policy wrote what go to docs/studies/rules.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from align.commands.sample import run_sample
from align.commands.sample_config import SampleConfig
from align.commands.stages import run_unless_finished
from align.data.conversation import to_json
from align.data.judgments import RuleJudgment
from align.data.readers import read_records, write_records
from align.data.records import Prompt
from align.examples import SampledResponse
from align.files import write_text
from align.launch import quiet_libraries
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import RULE, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.rules import RuleConfig, run_rule_model
from align.rules.scoring import RuleScorer, rules_of_model
from align.runtime.distributed import computes_on_cpu
from align.seeds import Stream, generator
from align.settings_parser import parse
from align.training.metrics_file import read_metrics
from benchmarks.studies.rules_tables import PLANTED, Scored, has_digit, write_report

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "rules"
STEPS = ("judge", "rules", "ppo", "answers", "report")
RULES = {
    PLANTED: "forms/rules/plain-style.yaml",
    "no-opinions-or-feelings": "forms/rules/sparrow-dialogue.yaml",
    "no-human-identity": "forms/rules/sparrow-dialogue.yaml",
}
JUDGE_SEED = 100
BATCH_TOKENS = 4096
TINY_PROMPT = 128
"""Tokens of a prompt that the tiny model was asked; a token of it is a byte."""
IDENTITY = 3
"""How often PPO meets each prompt about the assistant itself, where two of the rules are at stake; others once."""
VALIDATION = 80
"""Judgments of the other half by which a rule model is measured while it learns; each costs a pass."""
SIZES: dict[str, dict[str, dict[str, object]]] = {
    # Adapters on the fine-tuned model as in the demo, so that PPO keeps one base for the policy and both reward models.
    "smollm2-135m": {
        "rules": {"lora_rank": 16, "learning_rate": 5e-4, "warmup": 0.1, "batch_size": 8, "epochs": 2},
        "ppo": {"config": "configs/demo/smollm2-135m/ppo.yaml", "updates": 8, "rollout_size": 48, "minibatches": 3}
        | {"length_adjustment": 0.0},  # its figures are older than the demo's setting
        "sample": {"temperature": 0.7, "max_new_tokens": 64},
    },
    "tiny": {
        "rules": {
            "learning_rate": 1e-3,
            "batch_size": 32,
            "max_prompt_tokens": 192,
            "max_response_tokens": 192,
            "overlong": "truncate",
        },
        "ppo": {"config": "configs/demo/tiny/ppo.yaml", "updates": 3, "evaluate_every": 3},
        "sample": {"max_prompt_tokens": TINY_PROMPT, "max_new_tokens": 24, "overlong": "truncate"},
    },
}
"""Settings of the stages by the size of the model; the tiny one shows that the study runs, and nothing else."""


def main() -> None:
    """Do the steps that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", required=True, help="folder of the fine-tuned model")
    parser.add_argument("--reward", required=True, help="folder of the preference reward model")
    parser.add_argument("--control", help="folder of a policy that PPO made with the preference alone; none: not compared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="all steps: %(default)s")
    parser.add_argument("--size", choices=list(SIZES), default="smollm2-135m", help="the settings of the stages")
    parser.add_argument("--runs", type=Path, default=Path("runs/rules-study"), help="models and answers")
    parser.add_argument("--results", type=Path, default=STUDY, help="figures and tables")
    parser.add_argument("--rule_weight", type=float, default=2.0, help="of PPO")
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt before and after")
    parser.add_argument("--limit", type=int, default=0, help="prompts that are asked; 0: all")
    options = parser.parse_args()
    quiet_libraries()
    study = Study(options)
    study.write_data()
    if "judge" in options.steps:
        study.timed("judge", None, study.train_judge)
    for seed in options.seeds:
        for step in ("rules", "ppo", "answers"):
            if step in options.steps:
                study.timed(step, seed, getattr(study, step))
    if "report" in options.steps:
        study.report(options.seeds)


class Study:
    """All steps on one fine-tuned model and one reward model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.runs = options, options.runs
        self.settings = SIZES[options.size]
        self.data = self.runs / "data"

    def timed(self, step: str, seed: int | None, work: Callable[[int], None]) -> None:
        """Do a step unless it is done, and print its seconds; after a break, those of the last start alone."""
        began = time.monotonic()
        work(JUDGE_SEED if seed is None else seed)
        name = step if seed is None else f"{step} of seed {seed}"
        print(f"{name}: finished, {time.monotonic() - began:.0f} s", flush=True)

    # ------------------------------------------------------------------------------------------------------------- data

    def write_data(self) -> None:
        """Two halves of the judgments, and the prompts to train on and to ask; the same on every start."""
        judged = with_planted([*_records("rule_judgments"), *_records("rule_judgments_identity")])
        conversations = list(dict.fromkeys(_response(record)[0] for record in judged))
        order = generator(JUDGE_SEED, Stream.HELD_OUT_CONVERSATIONS).permutation(len(conversations)).tolist()
        first = {conversations[number] for number in order[: len(order) // 2]}
        halves = [[record for record in judged if (_response(record)[0] in first) == wanted] for wanted in (True, False)]
        measured = set(list(dict.fromkeys(map(_response, halves[1])))[:VALIDATION])
        validation = [record for record in halves[1] if _response(record) in measured]
        for name, part in zip(("policy", "judge", "validation"), (*halves, validation), strict=True):
            write_records(self.data / f"{name}.jsonl", part)
        learned = [p for p in _prompts("prompts") for _ in range(IDENTITY if p.category == "identity" else 1)]
        asked = [*_prompts("prompts_heldout"), *(p for p in _prompts("prompts_round2") if p.category == "identity")]
        both = {str(to_json(p.prompt)) for p in asked} & {*conversations, *(str(to_json(p.prompt)) for p in learned)}
        if both:
            raise SystemExit(f"{len(both)} prompts that are asked were trained on, such as {min(both)}")
        write_records(self.data / "prompts.jsonl", learned)
        write_records(self.data / "asked.jsonl", asked[: self.options.limit or None])

    # ----------------------------------------------------------------------------------------------------------- models

    def _settings(self, stage: str, config_class: type[Any], seed: int, **more: object) -> Any:
        """A stage's settings: those of the size, and `more`."""
        words = []
        for name, value in ({"model": self.options.sft, "seed": seed} | self.settings[stage] | more).items():
            words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
        return parse(config_class, words)

    def _rule_model(self, name: str, train: str, seed: int, **more: object) -> None:
        files = [f"{file}:{rule}" for rule, file in RULES.items()]
        more |= {"train_data": self.data / f"{train}.jsonl", "rules": files, "output_dir": self.runs / name}
        run_unless_finished(run_rule_model, self._settings("rules", RuleConfig, seed, **more))

    def train_judge(self, seed: int) -> None:
        """The judge learns from the half that no policy's rule model saw."""
        self._rule_model("judge", "judge", seed)

    def rules(self, seed: int) -> None:
        """The rule model that PPO gets, measured on a part of the other half."""
        self._rule_model(f"rules-{seed}", "policy", seed, validation_data=self.data / "validation.jsonl")

    def ppo(self, seed: int) -> None:
        """PPO by the preference and the rules."""
        more = {
            "reward_model": self.options.reward,
            "rule_model": self.runs / f"rules-{seed}" / "model",
            "rule_weight": self.options.rule_weight,
            "prompts": self.data / "prompts.jsonl",
            "output_dir": self.runs / f"ppo-{seed}",
        }
        run_unless_finished(run_ppo, self._settings("ppo", PPOConfig, seed, **more))

    # ---------------------------------------------------------------------------------------------------------- answers

    def policies(self, seed: int) -> dict[str, str]:
        """The folders of the models that answer, by name."""
        found = {"before": self.options.sft, "after": str(self.runs / f"ppo-{seed}" / "model")}
        return found | ({"control": self.options.control} if self.options.control else {})

    def answers(self, seed: int) -> None:
        """What each policy answers to prompts that nothing was trained on, with what all models say of it."""
        for name, model in self.policies(seed).items():
            target, sampled = self.scored_file(seed, name), self.runs / f"answers-{seed}-{name}.jsonl"
            if target.exists():
                continue
            if not sampled.exists():
                more = {"model": model, "prompts": self.data / "asked.jsonl", "output": sampled}
                more |= {"samples_per_prompt": self.options.samples, "reward_model": self.options.reward}
                more |= {"rule_model": self.runs / f"rules-{seed}" / "model"}
                run_sample(self._settings("sample", SampleConfig, seed, **more))
            rows = _rows(sampled)
            for row, judged in zip(rows, self.judged(rows), strict=True):
                row["judge"] = judged
            write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def scored_file(self, seed: int, policy: str) -> Path:
        """The file of a policy's scored answers."""
        return self.runs / f"scored-{seed}-{policy}.jsonl"

    def judged(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, list[float]]]:
        """How likely each answer violates each rule by the judge: for each row, by rule, a number an answer."""
        folder = str(self.runs / "judge" / "model")
        judge = load_reward_model(folder, "auto", kind=RULE)
        own = judge.loaded.tokenization
        reader = RewardModelScorer.from_loaded(judge, own, Accelerator(cpu=computes_on_cpu()), BATCH_TOKENS)
        responses = []
        for row in rows:
            prompt = Prompt.from_row(row).prompt
            ids = own.prompt_ids(prompt)
            if self.options.size == "tiny":
                ids = ids[-TINY_PROMPT:]
            responses += [SampledResponse(prompt, ids, own.response_ids(text), text) for text in row["responses"]]
        rules = rules_of_model(folder)
        said = iter(RuleScorer(reader, rules, own)(responses).T.tolist())
        each = [[next(said) for _ in row["responses"]] for row in rows]
        return [
            {rule: [round(answer[number], 4) for answer in answers] for number, rule in enumerate(rules)} for answers in each
        ]

    # ----------------------------------------------------------------------------------------------------------- report

    def report(self, seeds: Sequence[int]) -> None:
        """Write the figures of all seeds that are finished, and the table for a blind reader."""
        scored: Scored = {
            (seed, name): _rows(self.scored_file(seed, name))
            for seed in seeds
            for name in self.policies(seed)
            if self.scored_file(seed, name).exists()
        }
        models = {"judge": self.runs / "judge"} | {f"rules {seed}": self.runs / f"rules-{seed}" for seed in seeds}
        metrics = {name: read_metrics(folder)[-1] for name, folder in models.items() if (folder / "finished").exists()}
        write_report(self.options.results, scored, metrics)


def with_planted(judged: Sequence[RuleJudgment]) -> list[RuleJudgment]:
    """Judgments, with the program's verdict by the planted rule on every answer that has none."""
    known = {_response(record) for record in judged if record.rule == PLANTED}
    others = {_response(record): record for record in judged if _response(record) not in known}
    return [
        *judged,
        *(
            RuleJudgment(
                prompt=record.prompt,
                response=record.response,
                rule=PLANTED,
                verdict="violates" if has_digit(record.response) else "follows",
                labeler="program",
            )
            for record in others.values()
        ),
    ]


def _response(record: RuleJudgment) -> tuple[str, str]:
    """What tells a judged response from others."""
    return str(to_json(record.prompt)), record.response


def _records(name: str) -> list[RuleJudgment]:
    return read_records(ROOT / "data" / f"{name}.jsonl", RuleJudgment)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _prompts(name: str) -> list[Prompt]:
    return read_records(ROOT / "data" / f"{name}.jsonl", Prompt)


if __name__ == "__main__":
    main()
