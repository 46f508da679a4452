"""`align eval all`: truthfulness, toxicity and, with a reward model, reward in one table."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from accelerate import PartialState

from align.core.files import write_text
from align.core.launch import run_stage
from align.core.settings import option, require_setting
from align.core.settings_parser import parse
from align.eval import TASKS
from align.eval.results import EvalConfig, Evaluation, markdown_table, print_table
from align.runtime.progress import console
from align.sampling.settings import InferenceConfig


@dataclass(kw_only=True)
class AllConfig(EvalConfig, InferenceConfig):
    """Run several tasks on the same models, each with its own config."""

    truthfulness: str = option("configs/eval/truthfulness.yaml", "Config of the truthfulness task. Empty skips it.")
    toxicity: str = option("configs/eval/toxicity.yaml", "Config of the toxicity task. Empty skips it.")
    reward: str = option("configs/eval/reward.yaml", "Config of the reward task, which runs if reward_model is set.")
    reward_model: str = option("", "Reward model to evaluate and to score the models' answers with.")
    limit: int = option(0, "Maximum number of prompts or questions per task. 0 uses each config's limit.", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "models", bool(self.models), "set")
        has_task = bool(self.truthfulness or self.toxicity or self.reward_model)
        require_setting(self, "truthfulness", has_task, "set, unless toxicity or reward_model is")

    def task_arguments(self, task: str, file: str) -> list[str]:
        """Return the command-line arguments of a task: its config, then the settings shared by all tasks."""
        shared: dict[str, object] = {name: getattr(self, name) for name in ("output", "seed", "dtype", "batch_tokens")}
        shared |= {"skip_bad_rows": self.skip_bad_rows, "table": False}  # one table for all tasks is printed at the end
        if self.chat_template != "auto":  # toxicity has another default
            shared["chat_template"] = self.chat_template
        if self.limit:
            shared["limit"] = self.limit
        if task == "reward":
            shared["reward_model"] = self.reward_model
        words = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shared.items()]
        return ["--config", file, "--models", *self.models, *words]


def run_all(config: AllConfig) -> list[Evaluation]:
    """Run the tasks in sequence. Each writes its own files; `table.md` combines all measurements."""
    files = {"truthfulness": config.truthfulness, "toxicity": config.toxicity}
    files["reward"] = config.reward if config.reward_model else ""
    files = {name: file for name, file in files.items() if file}
    evaluations: list[Evaluation] = []
    for number, (name, file) in enumerate(files.items(), 1):
        if PartialState().is_main_process:
            console.print(f"task {number} of {len(files)}: {name}")
        config_class, function = TASKS[name].load()
        evaluations += cast(list[Evaluation], function(parse(config_class, config.task_arguments(name, file))))
    if PartialState().is_main_process:
        write_text(Path(config.output) / "table.md", markdown_table(evaluations))
        if config.table:
            print_table(evaluations)
    return evaluations


if __name__ == "__main__":
    run_stage(AllConfig, run_all)
