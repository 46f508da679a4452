"""The command `align`: it reads the first word of the command line and calls the command of that name.

Each command is imported when it is called: `align --help` does not wait for torch.
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
    "reward": Stage("train a reward model on ranked responses", "align.reward:RewardConfig:run_reward"),
    "rules": Stage(
        "train a model of rules on people's judgments of responses", "align.extras.rules:RuleConfig:run_rule_model"
    ),
    "attributes": Stage(
        "train a model of several qualities of a response, with a head for each",
        "align.extras.attributes:AttributeConfig:run_attribute_model",
    ),
    "ppo": Stage("train a policy against rewards by PPO", "align.ppo:PPOConfig:run_ppo"),
    "dpo": Stage("train a policy on ranked responses without a reward model", "align.dpo:DPOConfig:run_dpo"),
    "distill": Stage(
        "train a smaller model to predict what its teacher predicts", "align.extras.distill:DistillConfig:run_distill"
    ),
}
OTHER_STAGES = {
    "sample": Stage(
        "MODEL --prompt TEXT: print responses; --prompts FILE --output FILE: answer a file of prompts",
        "align.commands.sample:SampleConfig:sample_command",
        "model",
    ),
    "chat": Stage(
        "MODEL [MODEL]: talk to one or two models on the terminal", "align.commands.chat:ChatConfig:run_chat", "model"
    ),
    "loop": Stage("rounds of sampling, labeling, reward modeling and PPO", "align.extras.loop:LoopConfig:run_loop"),
    "plan": Stage(
        "estimate the cost of training before it starts: time and memory", "align.extras.plan:PlanConfig:run_plan"
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `align COMMAND ...`.

    Args:
        arguments: the words after the program's name; None: those of this process's command line.

    Raises:
        SystemExit: with code 2 after a user's mistake, which is printed as one line on stderr, and 130 after Ctrl-C.
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
    """The text of `align --help`: one line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: align COMMAND ...\n\ncommands:\n"
    return usage + "\n".join(lines) + "\n\nalign COMMAND --help explains a command, align --version prints the version"


def stage_configs() -> dict[str, type[Any]]:
    """Import the settings of each stage that trains; the key is the name of its command."""
    return {name: stage.load()[0] for name, stage in TRAINING_STAGES.items()}


def _hint(name: str, known: Iterable[str]) -> str:
    return nearest_name_hint(name, known) or f"; use one of {', '.join(known)}"


class Command(NamedTuple):
    """A command: its line in `align --help`, and the function that is called with the words after its name."""

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
        print("\nalign eval TASK --help lists a task's settings")
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
    "demo": Command("align a small model in all three stages and write a report", _demo),
    "eval": Command("eval TASK: evaluate models side by side; align eval --help lists the tasks", _eval),
    "report": Command(tools.REPORT_HELP, tools.report_command),
    "data": Command(tools.DATA_HELP, tools.data_command),
    "model": Command(tools.MODEL_HELP, tools.model_command),
    "annotate": Command("start the labeling app", _annotate),
}
"""Every command by its name, in the order of `align --help`."""

if __name__ == "__main__":
    main()
