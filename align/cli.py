"""The command `align`: it reads the words of the command line and calls the function that does the work.

Whatever a command needs is imported when it is called, so that `align --help` does not wait for torch.
"""

import argparse
import difflib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from align import __version__
from align.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
# What a checkpoint needs to be loaded here: never a pickle.
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Command:
    """One word behind `align`: a line for `--help`, and what it does with the words after it."""

    help: str
    run: Callable[[list[str]], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `align WORDS`; `arguments` are the words after the program's name.

    Raises:
        SystemExit: with 2 for a user's mistake, told in one line on stderr, and with 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(overview(), file=sys.stderr)
        raise SystemExit(2)
    name, rest = words[0], words[1:]
    if name in ("--help", "-h", "help"):
        print(overview())
    elif name == "--version":
        print(f"align {__version__}")
    else:
        with one_line_errors():
            _find(name).run(rest)


def overview() -> str:
    """The text of `align --help`: one line for each command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    usage = "usage: align COMMAND ...\n\ncommands:\n"
    return usage + "\n".join(lines) + "\n\nalign COMMAND --help explains a command, align --version tells the version"


def _find(name: str) -> Command:
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'; {_nearest(name, COMMANDS)}")
    return COMMANDS[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a user's mistake into one line and exit code 2, and Ctrl-C into one line and exit code 130."""
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[process {rank}] "  # a launcher mixes the lines of all its processes
    try:
        yield
    except UserError as error:
        print(f"{prefix}error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{prefix}interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def run_stage(
    config_class: type[Config],
    stage: Callable[[Config], object],
    arguments: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Run a stage with settings from the command line; a user's mistake is one line and exit code 2.

    Args:
        config_class: the stage's dataclass.
        stage: takes the settings.
        arguments: `--config FILE` and `--key value` pairs; None: those of this process.
        program: what `--help` calls the program.
    """
    from align.config import parse

    with one_line_errors():
        config = parse(config_class, sys.argv[1:] if arguments is None else arguments, program)
        quiet_libraries()
        stage(config)
        _leave_process_group()


def quiet_libraries() -> None:
    """Keep loading bars and advice of libraries out of a run's own lines; errors stay.

    For programs alone: importing `align` changes nothing in the process of others. `TRANSFORMERS_VERBOSITY` overrides.
    """
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        enable_progress_bars()  # a download of gigabytes keeps its bar
    # A filter outlives DeepSpeed's import, which sets the level of its logger anew.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    warnings.filterwarnings("ignore", category=FutureWarning)  # for the authors of libraries, not for their users
    threading.excepthook = _thread_failed


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Leave out what TensorBoard's writer dies of (a full disk): its next call tells it, as an error of the run."""
    if type(failure.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failure)


def _leave_process_group() -> None:
    """End the process group of a launched stage: one that is left open can abort at exit."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def _parser(name: str, **options: Any) -> _Parser:
    return _Parser(prog=f"align {name}", allow_abbrev=False, description=COMMANDS[name].help, **options)


def _sft(words: list[str]) -> None:
    from align.sft import SFTConfig, run_sft

    run_stage(SFTConfig, run_sft, words, "align sft")


def _reward(words: list[str]) -> None:
    from align.reward import RewardConfig, run_reward

    run_stage(RewardConfig, run_reward, words, "align reward")


def _ppo(words: list[str]) -> None:
    from align.ppo import PPOConfig, run_ppo

    run_stage(PPOConfig, run_ppo, words, "align ppo")


def _sample(words: list[str]) -> None:
    from align.sample import SampleConfig, run_sample

    run_stage(SampleConfig, run_sample, words, "align sample")


def _demo(words: list[str]) -> None:
    from align.demo import main as demo

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
        raise UserError(f"unknown task '{name}'; {_nearest(name, TASKS)}")
    config_class, function = TASKS[name].load()
    run_stage(config_class, function, words[1:], f"align eval {name}")


def _report(words: list[str]) -> None:
    parser = _parser("report")
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a stage's run, or of sft, reward and ppo"
    )
    parser.add_argument(
        "--output", type=Path, help="file to write (default: report.html in RUN, or beside the first of several)"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the results of align eval in RUN as Markdown tables instead"
    )
    parser.add_argument("--card", action="store_true", help="put them into the card of RUN's last model instead")
    given = parser.parse_args(words)
    from align.eval import report

    if given.markdown:
        print(report.results_as_markdown(given.runs), end="")
    elif given.card:
        for run in given.runs:
            print(report.write_model_card(run))
    else:
        print(report.write_reports(given.runs, given.output))


def _data(words: list[str]) -> None:
    from align.data import KINDS, check_data

    parser = _parser("data")
    actions = parser.add_subparsers(metavar="check", required=True, parser_class=_Parser)
    check = actions.add_parser("check", help="describe a file: records, lengths, ties, repeated prompts, bad rows")
    check.add_argument("file", metavar="FILE", help="a file, a folder or the name of a hub data set")
    check.add_argument("--kind", help=f"what its rows are: {', '.join(KINDS)}; default: what the first rows look like")
    given = parser.parse_args(words)
    print(check_data(given.file, given.kind))


def _model(words: list[str]) -> None:
    parser = _parser("model")
    actions = parser.add_subparsers(metavar="list|fetch", required=True, parser_class=_Parser)
    actions.add_parser("list", help="the models that need no hub").set_defaults(run=lambda _: _list_models())
    fetch = actions.add_parser("fetch", help="make or download a model now, and print its folder")
    fetch.add_argument("name", metavar="NAME", help="a built-in model, or a name on the hub")
    fetch.set_defaults(run=lambda given: print(_fetch_model(given.name)))
    given = parser.parse_args(words)
    given.run(given)


def _list_models() -> None:
    from align.models.zoo import list_builtin

    models = list_builtin()
    width = max(map(len, models))
    for name, description in models.items():
        print(f"{name:<{width}}  {description}")


def _fetch_model(name: str) -> Path:
    """The folder of a model; a hub model is downloaded, its safetensors only.

    Raises:
        UserError: if it cannot be had.
    """
    quiet_libraries()  # the path alone goes to stdout, for scripts
    from align.models.zoo import resolve_model

    found = resolve_model(name)
    if isinstance(found, Path):
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises errors of its own, and those of the network's library
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model '{name}': no such folder, and the hub did not give it ({why})") from error


def _annotate(words: list[str]) -> None:
    try:
        from annotation_ui.cli import main as annotate
    except ModuleNotFoundError as error:
        extra = "pip install 'align-rlhf[ui]'"
        raise UserError(
            f"the labelling app cannot start: {error.name} is not installed; install the extra: {extra}"
        ) from error
    annotate(words)


COMMANDS = {
    "sft": Command("fine-tune a model on demonstrations", _sft),
    "reward": Command("train a reward model on ranked responses", _reward),
    "ppo": Command("train a policy against rewards by PPO", _ppo),
    "sample": Command("write a model's responses to a file of prompts", _sample),
    "demo": Command("align a small model in all three stages and write a report", _demo),
    "eval": Command("eval TASK: evaluate models side by side; align eval --help lists the tasks", _eval),
    "report": Command("write the report of a run, or of several side by side", _report),
    "data": Command("data check FILE: say what is in a file of records, and which rows are bad", _data),
    "model": Command("model list, model fetch NAME: built-in models, and downloads ahead of time", _model),
    "annotate": Command("start the labelling app", _annotate),
}
"""Every command by its name, in the order of `align --help`."""

if __name__ == "__main__":
    main()
