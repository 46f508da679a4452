"""`align replay`: a response of a PPO run, sampled again to the bit, with all that was learned from it."""

from pathlib import Path
from typing import TYPE_CHECKING

from align.commands.arguments import OneLineParser
from align.errors import UserError

if TYPE_CHECKING:
    from align.ppo.rollout_files import RolloutRow

HELP = "sample a response of a PPO run again, to the bit"


def main(arguments: list[str]) -> None:
    """Sample the response again, print it with its figures, and compare it with what the run wrote.

    Args:
        arguments: the command line after `align replay`.

    Raises:
        UserError: for invalid arguments, if the run does not keep what is needed, or if the response differs from the recorded one.
    """
    parser = OneLineParser(prog="align replay", allow_abbrev=False, description=HELP)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run of PPO, or of sft, reward and ppo")
    parser.add_argument("--update", type=int, required=True, help="number of the update, from 1")
    parser.add_argument("--row", type=int, required=True, help="place of the response in its rollout, from 0")
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
        show(result.row)
        if result.recorded is None:
            print(
                f"\nnot compared: the run did not write update {options.update}, row {options.row} (rollout_updates, rows)"
            )
        elif not result.difference:
            print("\nthe same to the bit as the run wrote it")
    end_process_group()
    if result.difference:
        raise UserError(result.difference)


def show(row: "RolloutRow") -> None:
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
    for place, (token, number, *figures) in enumerate(columns):
        # repr shows white space, and tokens that are part of a character.
        table.add_row(str(place), repr(visible_text(token)), str(number), *(f"{figure:.4f}" for figure in figures))
    out.print(table)
