"""`align report`: the report of runs as a page, as Markdown tables, or in a model card."""

from pathlib import Path

from align.commands.arguments import OneLineParser

HELP = "write the report of a run, or of several side by side"


def main(arguments: list[str]) -> None:
    """Write what is asked for, and print the path of each written file.

    Args:
        arguments: the command line after `align report`.

    Raises:
        UserError: for invalid arguments, or a folder that holds no run.
    """
    parser = OneLineParser(prog="align report", allow_abbrev=False, description=HELP)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a stage's run, or of sft, reward and ppo"
    )
    parser.add_argument(
        "--output", type=Path, help="file to write (default: report.html in RUN, or next to the first of several runs)"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the results of align eval in RUN as Markdown tables instead"
    )
    parser.add_argument(
        "--card", action="store_true", help="write the results of align eval into the card of RUN's last model instead"
    )
    options = parser.parse_args(arguments)
    from align.eval import report  # imported here so that --help does not wait for matplotlib

    if options.markdown:
        print(report.results_as_markdown(options.runs), end="")
    elif options.card:
        for run in options.runs:
            print(report.write_model_card(run))
    else:
        print(report.write_reports(options.runs, options.output))
