"""The judge of `make demo`: a small reward model of labels that no policy of the demo learned from.

`data/judge/` holds a LoRA adapter of SmolLM2-135M-Instruct and its head, made once by the settings in
`configs/demo/smollm2-135m/judge.yaml`. The
tokenizer is the base's own, copied when the model is made.
"""

import shutil
from pathlib import Path

from align.core.shipped import shipped_root

BASE = "smollm2-135m"
ADAPTER = shipped_root() / "data" / "judge"


def build(folder: Path, base: Path) -> None:
    """Write the reward model as an adapter folder.

    Args:
        folder: the empty folder to fill.
        base: the folder of `BASE`.
    """
    for path in (*ADAPTER.iterdir(), base / "tokenizer.json", base / "tokenizer_config.json"):
        shutil.copyfile(path, folder / path.name)
