"""The `align` command line.

Commands are imported on first use, so `align --help` does not import torch.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from align import __version__
from align.commands import tools
from align.core.errors import UserError, nearest_name_hint
from align.core.launch import Stage, one_line_errors, quiet_libraries, run_stage
from align.core.plugins import require_extra

TRAINING_STAGES = {
    "sft": Stage("fine-tune a model on demonstrations", "align.sft:SFTConfig:run_sft"),
    "reward": Stage("train a reward model on rankings", "align.reward:RewardConfig:run_reward"),
    "rules": Stage("train a rule model on human judgments", "align.extras.rules:RuleConfig:run_rule_model"),
    "attributes": Stage(
        "train an attribute model with one head per attribute",
        "align.extras.attributes:AttributeConfig:run_attribute_model",
    ),
    "ppo": Stage("train a policy with PPO", "align.ppo:PPOConfig:run_ppo"),
    "dpo": Stage("train a policy with DPO, without a reward model", "align.dpo:DPOConfig:run_dpo"),
    "distill": Stage("distill a model into a smaller one", "align.extras.distill:DistillConfig:run_distill"),
}
OTHER_STAGES = {
    "sample": Stage(
        "sample responses to prompts",
        "align.commands.sample:SampleConfig:sample_command",
        "model",
    ),
    "score": Stage("add scores to a file of answers", "align.extras.score:ScoreConfig:run_score", "file"),
    "serve": Stage("serve a reward model over HTTP", "align.extras.serve:ServeConfig:run_serve", "model"),
    "chat": Stage("chat with one or two models in the terminal", "align.commands.chat:ChatConfig:run_chat", "model"),
    "loop": Stage("run rounds of sampling, labeling, reward modeling and PPO", "align.extras.loop:LoopConfig:run_loop"),
    "plan": Stage("estimate time and memory of training", "align.extras.plan:PlanConfig:run_plan"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `align COMMAND ...`.

    Args:
        arguments: command-line arguments without the program name. Default: `sys.argv[1:]`.

    Raises:
        SystemExit: with code 2 on a user error, printed as one line to stderr, and 130 on Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(overview(), file=sys.stderr)
        raise SystemExit(2)
    name, rest = words[0], words[1:]
    with one_line_errors():
        if name in ("--help", "-h", "help"):
            print(overview())
        elif name == "--version":
            print(f"align {__version__}")
        elif name not in COMMANDS:
            raise UserError(f"unknown command '{name}'{_hint(name, COMMANDS)}")
        else:
            COMMANDS[name].run(rest)


def overview() -> str:
    """Return the text of `align --help`: one line per command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: align COMMAND ...\n\ncommands:\n"
    return (
        usage + "\n".join(lines) + "\n\nRun `align COMMAND --help` for help on a command, `align --version` for the version."
    )


def stage_configs() -> dict[str, type[Any]]:
    """Import the config class of each training stage, by command name."""
    return {name: stage.load()[0] for name, stage in TRAINING_STAGES.items()}


def _hint(name: str, known: Iterable[str]) -> str:
    return nearest_name_hint(name, known) or f"; choose from {', '.join(known)}"


class Command(NamedTuple):
    """A command: its line in `align --help`, and a function that takes its arguments."""

    help: str
    run: Callable[[list[str]], None]


def _run_stage(name: str, stage: Stage, words: list[str]) -> None:
    program = f"align {name}" + f" [{stage.positional.upper()} ...]" * bool(stage.positional)
    run_stage(*stage.load(), stage.named(words), program)


def _of_stages(stages: dict[str, Stage]) -> dict[str, Command]:
    return {name: Command(stage.help, partial(_run_stage, name, stage)) for name, stage in stages.items()}


def _demo(words: list[str]) -> None:
    from align.commands.demo import main as demo

    quiet_libraries()
    demo(words)


def _eval(words: list[str]) -> None:
    from align.eval import TASKS

    if not words or words[0] in ("--help", "-h"):
        width = max(map(len, TASKS))
        print("usage: align eval TASK [--config FILE.yaml ...] [--SETTING VALUE ...]\n\ntasks:")
        print("\n".join(f"  {name:<{width}}  {task.help}" for name, task in TASKS.items()))
        print("\nRun `align eval TASK --help` for help on a task.")
        return
    name = words[0]
    if name not in TASKS:
        raise UserError(f"unknown task '{name}'{_hint(name, TASKS)}")
    _run_stage(f"eval {name}", TASKS[name], words[1:])


def _annotate(words: list[str]) -> None:
    with require_extra("ui"):
        from annotation_ui.cli import main as annotate
    code = annotate(words)
    if code:
        raise SystemExit(code)


COMMANDS = {
    **_of_stages(TRAINING_STAGES),
    "launch": Command(tools.LAUNCH_HELP, tools.launch_processes),
    **_of_stages(OTHER_STAGES),
    "demo": Command("run all three stages on a small model and write a report", _demo),
    "eval": Command("evaluate models side by side (run `align eval --help` for the tasks)", _eval),
    "report": Command(tools.REPORT_HELP, tools.report_command),
    "data": Command(tools.DATA_HELP, tools.data_command),
    "model": Command(tools.MODEL_HELP, tools.model_command),
    "annotate": Command("start the labeling app", _annotate),
}
"""All commands by name, in the order of `align --help`."""

if __name__ == "__main__":
    main()
