"""`align model list`, `fetch` and `consolidate`: built-in models, downloads ahead of time, and models from checkpoints."""

import sys
from pathlib import Path

from align.commands.arguments import OneLineParser
from align.core.errors import UserError, first_line
from align.core.launch import quiet_libraries

HELP = "model list, model fetch NAME, model consolidate RUN: built-in models, downloads, a checkpoint as a plain folder"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""The files of a hub model that are needed to load it here: never a pickle."""


def main(arguments: list[str]) -> None:
    """List the built-in models, or print the folder of one model after making, downloading or consolidating it.

    Args:
        arguments: the command line after `align model`.

    Raises:
        UserError: for invalid arguments, or a model that cannot be made, downloaded or read.
    """
    parser = OneLineParser(prog="align model", allow_abbrev=False, description=HELP)
    actions = parser.add_subparsers(metavar="list|fetch|consolidate", required=True)
    actions.add_parser("list", help="list the models that need no hub").set_defaults(run=lambda _: _print_builtin_models())
    fetch = actions.add_parser("fetch", help="make or download a model, and print its folder")
    fetch.add_argument("name", metavar="NAME", help="a built-in model, or a name on the hub")
    fetch.set_defaults(run=lambda options: print(fetch_model(options.name)))
    whole = actions.add_parser("consolidate", help="write the policy of a checkpoint as a folder that loads elsewhere")
    whole.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run's folder (its last checkpoint), or a checkpoint")
    whole.add_argument("--output", required=True, metavar="DIR", help="the folder to write; replaced in one step")
    whole.set_defaults(run=lambda options: _consolidate(Path(options.source), Path(options.output)))
    options = parser.parse_args(arguments)
    options.run(options)


def _print_builtin_models() -> None:
    from align.builtin.zoo import list_builtin

    models = list_builtin()
    width = max(map(len, models))
    for name, description in models.items():
        print(f"{name:<{width}}  {description}")


def _consolidate(source: Path, output: Path) -> None:
    quiet_libraries()
    from align.training.checkpoint.consolidation import consolidate

    checkpoint = consolidate(source, output)
    print(output)
    print(f"consolidated {checkpoint}", file=sys.stderr)


def fetch_model(name: str) -> Path:
    """The folder of a model, which is made or downloaded if it is not on this machine; of a hub model, only `HUB_FILES`.

    Args:
        name: a built-in model, a folder or a hub name.

    Raises:
        UserError: if it cannot be made or downloaded.
    """
    quiet_libraries()  # only the path goes to stdout, for scripts
    from align.builtin.zoo import resolve_model

    source = resolve_model(name)
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises errors of its own, and those of the network's library
        raise UserError(
            f"model '{name}': no such folder, and it cannot be loaded from the hub ({first_line(error)})"
        ) from error
