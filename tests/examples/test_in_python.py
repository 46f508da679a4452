"""The Python code of docs/howto/in-python.md runs, each block by itself, with a tiny model in place of the real one."""

import re
from pathlib import Path

from tests.project.test_pages import ROOT, blocks

PAGE = ROOT / "docs" / "howto" / "in-python.md"
SMALL = "total_updates=1, rollout_batch_size=4, max_new_tokens=4"


def test_the_blocks_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(PAGE, ("python",)):
        code = block.replace("smollm2-135m", "tiny-llama").replace("total_updates=20", SMALL)
        assert code != block
        exec(code, {})
    written = {name for block in blocks(PAGE, ("python",)) for name in re.findall(r'output_dir="(.*?)"', block)}
    assert len(written) == 6
    assert [name for name in sorted(written) if not (Path(name) / "model").is_dir()] == []
