"""`align replay`: resample a response of a PPO run bit for bit, with its rewards, KL, values and advantages."""

from pathlib import Path
from typing import TYPE_CHECKING

from align.commands.arguments import OneLineParser
from align.errors import UserError

if TYPE_CHECKING:
    from align.ppo.rollout_files import RolloutRow

HELP = "resample a response of a PPO run, bit for bit"


def main(arguments: list[str]) -> None:
    """Sample the response again, print it with its figures, and compare it with what the run wrote.

    Args:
        arguments: the command line after `align replay`.

    Raises:
        UserError: for invalid arguments, a run that lacks the needed files, or a response that differs.
    """
    parser = OneLineParser(prog="align replay", allow_abbrev=False, description=HELP)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run of PPO, or of sft, reward and ppo")
    parser.add_argument("--update", type=int, required=True, help="number of the update, from 1")
    parser.add_argument("--row", type=int, required=True, help="index of the response in its rollout, from 0")
    parser.add_argument(
        "--learn_again",
        "--learn-again",
        type=int,
        default=0,
        metavar="N",
        help="learn up to N updates again, from the last checkpoint before (default: 0)",
    )
    options = parser.parse_args(arguments)
    from align.launch import end_process_group, quiet_libraries
    from align.ppo.replay import replay, trainer_of_run

    quiet_libraries()
    run = options.run / "ppo" if (options.run / "ppo" / "config.yaml").exists() else options.run
    with trainer_of_run(run) as trainer:
        result = replay(trainer, run, options.update, options.row, options.learn_again)
        is_main = trainer.run.is_main
    if is_main:
        print_response(result.row)
        if result.recorded is None:
            print(
                f"\nnot compared: the run did not write update {options.update}, row {options.row} (rollout_updates, rows)"
            )
        elif not result.difference:
            print("\nthe same to the bit as the run wrote it")
    end_process_group()
    if result.difference:
        raise UserError(result.difference)


def print_response(row: "RolloutRow") -> None:
    """Print a response: prompt, answer, parts of the reward, and a table of its tokens."""
    from rich.console import Console
    from rich.table import Table

    from align.eval.report.text import format_number, visible_text

    out = Console(soft_wrap=True, highlight=False, markup=False)
    for turn in row.prompt:
        out.print(f"{turn['role']}: {visible_text(turn['content'])}")
    out.print(f"answer: {visible_text(row.text)}{'' if row.ended else '  (cut off)'}\n")
    parts = ", ".join(f"{visible_text(name)} {format_number(value)}" for name, value in row.parts.items())
    out.print(f"reward {format_number(row.reward)} ({parts}), learned from as {format_number(row.score)}")
    out.print(f"KL {format_number(sum(row.kl))} nats, {len(row.ids)} tokens\n")
    table = Table("place", "token", "id", "log-prob", "KL", "value", "advantage")
    columns = zip(row.tokens, row.ids, row.log_probs, row.kl, row.values, row.advantages, strict=True)
    for index, (token, token_id, *numbers) in enumerate(columns):
        # repr makes white space and incomplete characters visible.
        table.add_row(str(index), repr(visible_text(token)), str(token_id), *(f"{number:.4f}" for number in numbers))
    out.print(table)
