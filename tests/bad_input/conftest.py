"""Small files and the check that a command was refused in one line."""

import json

import pytest

from align import cli

# The number format is given: `auto` depends on the processor.
TINY = ("--model", "tiny-gpt2", "--dtype", "bfloat16", "--report_to", "none")
SHORT = ("--total_updates", "1", "--rollout_batch_size", "4", "--max_new_tokens", "4", "--max_prompt_tokens", "64")


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def snapshot(folder):
    """Every file under a folder, whole."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def demonstrations(tmp_path):
    return write_rows(tmp_path / "demos.jsonl", *({"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)))


@pytest.fixture
def prompts(tmp_path):
    return write_rows(tmp_path / "prompts.jsonl", *({"prompt": f"Is {i} odd?"} for i in range(4)))


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must fail; gives its error line. It writes nothing to stdout, and nothing to a new run folder."""

    def run(*words, output=None, alone=True):
        folder = output or tmp_path / "run"
        before = snapshot(folder) if output else None
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in (*words, "--output_dir", folder)])
        printed = capsys.readouterr()
        assert ended.value.code == 2
        assert printed.out == ""
        lines = printed.err.splitlines()
        assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True]
        assert "Traceback" not in printed.err
        if alone:
            assert len(lines) == 1, lines
        if output is None:
            assert not folder.exists(), sorted(folder.rglob("*"))
        else:
            assert snapshot(folder) == before
        return lines[-1]

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A fine-tuning run of two updates, with its last checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"prompt": f"Is {i} odd?", "completion": "Yes."} for i in range(4)]
    data = write_rows(folder / "demos.jsonl", *rows)
    words = ["sft", *TINY, "--train_data", str(data), "--num_train_epochs", "2", "--save_steps", "1"]
    cli.main([*words, "--output_dir", str(folder / "run")])
    return folder / "run"
