"""The command `align`: it reads the first word of the command line and calls the command of that name.

What a command needs is imported when it is called, so that `align --help` does not wait for torch.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from align import __version__
from align.commands import data_check, launch, models, report
from align.core.errors import UserError, nearest_name_hint
from align.core.launch import one_line_errors, quiet_libraries, run_stage


@dataclass(frozen=True)
class Command:
    """A command: its line in `align --help`, and the function that is called with the words after its name."""

    help: str
    run: Callable[[list[str]], None]


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
        else:
            _find(name).run(rest)


def overview() -> str:
    """The text of `align --help`: one line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: align COMMAND ...\n\ncommands:\n"
    return usage + "\n".join(lines) + "\n\nalign COMMAND --help explains a command, align --version prints the version"


def _find(name: str) -> Command:
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'{_hint(name, COMMANDS)}")
    return COMMANDS[name]


def _hint(name: str, known: Iterable[str]) -> str:
    return nearest_name_hint(name, known) or f"; use one of {', '.join(known)}"


def _sft(words: list[str]) -> None:
    from align.sft import SFTConfig, run_sft

    run_stage(SFTConfig, run_sft, words, "align sft")


def _reward(words: list[str]) -> None:
    from align.reward import RewardConfig, run_reward

    run_stage(RewardConfig, run_reward, words, "align reward")


def _rules(words: list[str]) -> None:
    from align.rules import RuleConfig, run_rule_model

    run_stage(RuleConfig, run_rule_model, words, "align rules")


def _attributes(words: list[str]) -> None:
    from align.attributes import AttributeConfig, run_attribute_model

    run_stage(AttributeConfig, run_attribute_model, words, "align attributes")


def _ppo(words: list[str]) -> None:
    from align.ppo import PPOConfig, run_ppo

    run_stage(PPOConfig, run_ppo, words, "align ppo")


def _dpo(words: list[str]) -> None:
    from align.dpo import DPOConfig, run_dpo

    run_stage(DPOConfig, run_dpo, words, "align dpo")


def _distill(words: list[str]) -> None:
    from align.distill import DistillConfig, run_distill

    run_stage(DistillConfig, run_distill, words, "align distill")


def _sample(words: list[str]) -> None:
    from align.commands.sample import run_sample
    from align.commands.sample_config import SampleConfig

    run_stage(SampleConfig, run_sample, words, "align sample")


def _loop(words: list[str]) -> None:
    from align.commands.loop.config import LoopConfig
    from align.commands.loop.main import run_loop

    run_stage(LoopConfig, run_loop, words, "align loop")


def _plan(words: list[str]) -> None:
    from align.commands.plan.config import PlanConfig
    from align.commands.plan.main import run_plan

    run_stage(PlanConfig, run_plan, words, "align plan")


def _serve_reward(words: list[str]) -> None:
    from align.commands.serve_reward import ServeRewardConfig, run_serve_reward

    run_stage(ServeRewardConfig, run_serve_reward, words, "align serve-reward")


def _demo(words: list[str]) -> None:
    from align.commands.demo import main as demo

    quiet_libraries()
    demo(words)


def _eval(words: list[str]) -> None:
    from align.eval.tasks import TASKS

    if not words or words[0] in ("--help", "-h"):
        width = max(map(len, TASKS))
        print("usage: align eval TASK --config FILE --key value ...\n\ntasks:")
        print("\n".join(f"  {name:<{width}}  {task.help}" for name, task in TASKS.items()))
        print("\nalign eval TASK --help lists a task's settings")
        return
    name = words[0]
    if name not in TASKS:
        raise UserError(f"unknown task '{name}'{_hint(name, TASKS)}")
    config_class, function = TASKS[name].load()
    run_stage(config_class, function, words[1:], f"align eval {name}")


def _annotate(words: list[str]) -> None:
    try:
        from annotation_ui.cli import main as annotate
    except ModuleNotFoundError as error:
        extra = "pip install 'align-rlhf[ui]'"
        raise UserError(
            f"the labeling app cannot start: {error.name} is not installed; install the extra: {extra}"
        ) from error
    code = annotate(words)
    if code:
        raise SystemExit(code)


COMMANDS = {
    "sft": Command("fine-tune a model on demonstrations", _sft),
    "reward": Command("train a reward model on ranked responses", _reward),
    "rules": Command("train a model of rules on people's judgments of responses", _rules),
    "attributes": Command("train a model of several qualities of a response, with a head for each", _attributes),
    "ppo": Command("train a policy against rewards by PPO", _ppo),
    "dpo": Command("train a policy on ranked responses without a reward model", _dpo),
    "distill": Command("train a smaller model to predict what its teacher predicts", _distill),
    "launch": Command(launch.HELP, launch.main),
    "sample": Command("write a model's responses to a file of prompts", _sample),
    "loop": Command("rounds of sampling, labeling, reward modeling and PPO", _loop),
    "plan": Command("say what training will cost, before it starts: time, energy, memory", _plan),
    "serve-reward": Command("answer HTTP requests with a reward model's scores", _serve_reward),
    "demo": Command("align a small model in all three stages and write a report", _demo),
    "eval": Command("eval TASK: evaluate models side by side; align eval --help lists the tasks", _eval),
    "report": Command(report.HELP, report.main),
    "data": Command(data_check.HELP, data_check.main),
    "model": Command(models.HELP, models.main),
    "annotate": Command("start the labeling app", _annotate),
}
"""Every command by its name, in the order of `align --help`."""

if __name__ == "__main__":
    main()
