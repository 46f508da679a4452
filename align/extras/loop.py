"""`align loop`: rounds of sampling, ranking, reward modeling and PPO.

Each step writes its files atomically, or is a run that resumes from its checkpoints; `loop.json` lists the finished steps.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from align.commands.sample import SampleConfig, run_sample
from align.core.errors import UserError
from align.core.files import read_json_lines, write_json, write_json_lines
from align.core.launch import run_unless_finished
from align.core.seeds import RngStream, generator
from align.core.settings_parser import parse
from align.core.statistics import share_interval
from align.data.readers import read_records, write_records
from align.data.records import Prompt, Ranking
from align.eval.policy_comparison import PolicyComparison, compare_policies
from align.eval.report.page import write_report
from align.extras.loop_labels import (
    AnswerScorer,
    LoopConfig,
    LoopState,
    Row,
    SimulatedLabeler,
    choose_prompts,
    make_labeler,
    merge_answers,
)
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.runtime.progress import console
from align.sampling.generation import SamplingParams
from align.training.run_folder import read_metrics


def run_loop(config: LoopConfig) -> Path:
    """Run or resume a loop until all rounds are finished or labels are missing. Return its folder."""
    loop, rounds = Loop(config), range(1, config.rounds + 1)
    for number in rounds:
        while missing := loop.run_round(number):
            console.print(f"round {number} is waiting for labels: {missing}")
            if not config.poll_seconds:
                console.print("run the same command again when they are available")
                return loop.folder
            time.sleep(config.poll_seconds)
    for number in rounds:
        console.print(summary(loop.state.steps, number))
    return loop.folder


class Loop:
    """The rounds of a loop."""

    def __init__(self, config: LoopConfig) -> None:
        self.config, self.folder = config, Path(config.output_dir)
        self.state = LoopState(self.folder / "loop.json", asdict(config))
        self.labeler = make_labeler(config.labeler, config.database, config.labelers_per_item)
        self.reward = parse(RewardConfig, ["--config", config.reward_config])
        self.ppo = parse(PPOConfig, ["--config", config.ppo_config])

    def run_round(self, number: int) -> str:
        """Run the remaining steps of a round, counted from 1. Return a description of missing labels, or ""."""
        folder, name = self.folder / f"round-{number}", f"round-{number}"
        run_once = self.state.run_once
        run_once(f"{name}/samples", lambda: self._sample(number, folder))
        rankings = folder / "rankings.jsonl"
        if f"{name}/rankings" not in self.state.steps:
            missing = self.labeler.collect(name, folder / "samples.jsonl", rankings)
            if missing:
                return missing
        run_once(f"{name}/rankings", lambda: {"rankings": len(read_records(rankings, Ranking))})
        run_once(f"{name}/split", lambda: self._split(number, folder))
        for member in range(self.config.reward_models):
            run_once(f"{name}/reward-{member}", partial(self._train_reward, number, member))
        run_once(f"{name}/ppo", lambda: self._train_policy(number))
        run_once(f"{name}/comparison", lambda: self._compare(number, folder))
        return ""

    def _sample(self, number: int, folder: Path) -> dict[str, Any]:
        config = self.config
        used = {row["id"] for earlier in range(1, number) for row in self._rows(earlier, "prompts.jsonl")}
        random = generator(config.seed, RngStream.LOOP_PROMPTS, number)
        prompts = choose_prompts(config.prompts, used, config.prompts_per_round, random)
        write_json_lines(folder / "candidates.jsonl", prompts)
        models = [config.model, *([str(self._policy(number - 1))] if number > 1 else [])]
        parts = [
            self._answers(folder, model, index, temperature)
            for index, model in enumerate(models)
            for temperature in config.temperatures
        ]
        rows = merge_answers(parts, f"round-{number}/")
        if not rows:
            raise UserError(f"round {number}: no prompt has two distinct answers; raise temperatures or samples")
        chosen = {row["id"].removeprefix(f"round-{number}/") for row in rows}
        write_json_lines(folder / "prompts.jsonl", [prompt for prompt in prompts if prompt["id"] in chosen])
        write_json_lines(folder / "samples.jsonl", rows)
        return {"prompts": len(rows), "answers": sum(len(row["responses"]) for row in rows)}

    def _answers(self, folder: Path, model: str, index: int, temperature: float) -> list[Row]:
        target = folder / "answers" / f"{index}-{temperature:g}.jsonl"
        if not target.exists():
            settings = SampleConfig(
                model=[model],
                prompts=str(folder / "candidates.jsonl"),
                output=str(target),
                samples_per_prompt=self.config.samples,
                temperature=temperature,
                max_new_tokens=self.config.max_new_tokens,
                max_prompt_tokens=self.ppo.max_prompt_tokens,
                overlong=self.ppo.overlong,
                chat_template=self.ppo.chat_template,
                dtype=self.ppo.dtype,
                seed=self.config.seed + index,  # with the same random numbers, the policies would answer almost identically
            )
            run_sample(settings)
        return read_json_lines(target)

    def _split(self, number: int, folder: Path) -> dict[str, Any]:
        """Hold out some prompts with all their rankings. Drop overruled and fully tied rankings."""
        read = [ranking for ranking in read_records(folder / "rankings.jsonl", Ranking) if not ranking.overruled]
        rows = [(row.id or str(row.prompt), row) for row in read if not row.all_tied]
        if not rows:
            raise UserError(f"round {number}: all {len(read)} rankings are fully tied")
        ids = sorted({name for name, _ in rows})
        order = generator(self.config.seed, RngStream.LOOP_PROMPTS, number, 2).permutation(len(ids))
        held_out = {ids[index] for index in order[: round(len(ids) * self.config.validation_split)]}
        parts = {"train": [row for name, row in rows if name not in held_out]}
        parts["heldout"] = [row for name, row in rows if name in held_out]
        for part, kept in parts.items():
            write_records(folder / f"{part}.jsonl", kept)
        return {part: len(kept) for part, kept in parts.items()} | {"all tied": len(read) - len(rows)}

    def _train_reward(self, number: int, member: int) -> dict[str, Any]:
        rounds = range(1, number + 1)
        weights = [self.config.earlier_weight ** (number - round_number) for round_number in rounds]
        files = [
            f"{self.folder}/round-{round_number}/train.jsonl={weight:g}"
            for round_number, weight in zip(rounds, weights, strict=True)
        ]
        files += [self.config.more_rankings] if self.config.more_rankings else []
        held_out = [
            f"{self.folder}/round-{round_number}/heldout.jsonl"
            for round_number in rounds
            if self._rows(round_number, "heldout.jsonl")
        ]
        config = replace(
            self.reward,
            model=self.config.model,
            train_data=", ".join(files),
            validation_data=", ".join(held_out),
            output_dir=str(self._reward_folder(number, member).parent),
            seed=self.config.seed + member,
        )
        run_unless_finished(run_reward, config)
        accuracy = read_metrics(Path(config.output_dir))[-1].get("validation/accuracy")
        return {} if accuracy is None else {"validation/accuracy": round(accuracy, 4)}

    def _train_policy(self, number: int) -> dict[str, Any]:
        members = [str(self._reward_folder(number, member)) for member in range(self.config.reward_models)]
        folder, seed = str(self._policy(number).parent), self.config.seed
        config = replace(self.ppo, model=self.config.model, reward_model=members, output_dir=folder, seed=seed)
        return {"model": str(run_unless_finished(run_ppo, config))}

    def _compare(self, number: int, folder: Path) -> dict[str, Any]:
        prompts = read_records(self.config.evaluation_prompts, Prompt)
        comparison = compare_policies(
            self.config.model,
            str(self._policy(number)),
            load_reward_model(str(self._reward_folder(number, 0)), self.ppo.dtype),
            prompts,
            SamplingParams(self.config.max_new_tokens, self.ppo.temperature),
            self.config.seed,
            dtype=self.ppo.dtype,
            max_prompt_tokens=self.ppo.max_prompt_tokens,
            chat_template=self.ppo.chat_template,
        )
        results: dict[str, Any] = {"reward gain": round(comparison.gain, 3), "KL": round(comparison.kl, 2)}
        if isinstance(self.labeler, SimulatedLabeler):
            results |= labeler_measurements(self.labeler.score, comparison)
        write_json(folder / "comparison.json", results)
        write_report(folder)
        return results

    def _rows(self, number: int, name: str) -> list[Row]:
        return read_json_lines(self.folder / f"round-{number}" / name)

    def _reward_folder(self, number: int, member: int) -> Path:
        """Return the folder of a reward model. The first one has the path that the report expects."""
        return self.folder / f"round-{number}" / (f"reward-{member}" if member else "reward") / "model"

    def _policy(self, number: int) -> Path:
        return self.folder / f"round-{number}" / "ppo" / "model"


def labeler_measurements(score: AnswerScorer, comparison: PolicyComparison) -> dict[str, Any]:
    """Score the policy with a simulated labeler: reward gain and win rate."""
    prompts = [list(prompt.prompt) for prompt in comparison.prompts for _ in range(comparison.samples)]
    before, after = (numpy.array(score(prompts, part.texts)) for part in (comparison.before, comparison.after))
    wins = (after > before) + 0.5 * (after == before)
    low, high = share_interval(wins.reshape(-1, comparison.samples).mean(1))
    return {
        "labeler's gain": round(float(after.mean() - before.mean()), 3),
        "labeler's win rate": round(float(wins.mean()), 3),
        "interval": [round(low, 3), round(high, 3)],
    }


def summary(steps: dict[str, dict[str, Any]], number: int) -> str:
    """Return the summary line of a finished round."""
    name = f"round-{number}"
    results = {"rankings": steps[f"{name}/rankings"]["rankings"]}
    results |= {"held-out accuracy": steps[f"{name}/reward-0"].get("validation/accuracy", "-")}
    results |= {key: value for key, value in steps[f"{name}/comparison"].items() if key != "seconds"}
    return f"round {number}: " + ", ".join(f"{key} {value}" for key, value in results.items())
