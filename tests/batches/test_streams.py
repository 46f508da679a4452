"""Streamed data: every row once a pass, a position that is enough to go on, and memory that does not grow with the file."""

import json
import shutil
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from align import cli
from align.batches.streams import ExampleStream, StreamedBatches
from align.core.errors import UserError
from align.sft import SFTConfig, SFTTrainer
from tests.files import read_rows, write_rows

ALONE = SimpleNamespace(num_processes=1, process_index=0)


def number_of(row):
    """The number in a row; odd tens are dropped, and 13 is bad."""
    if row.error is not None or row.row["n"] == 13:
        raise UserError(f"{row.where}: bad")
    return [] if row.row["n"] % 20 == 10 else [row.row["n"]]


@pytest.fixture
def write(tmp_path):
    def write(count, name="rows.jsonl", **fields):
        return write_rows(tmp_path / name, ({"n": n, **fields} for n in range(count)))

    return write


def stream(source, block=4, key=(0, 0), accelerator=ALONE, encode=lambda row: [row.row["n"]], **more):
    return ExampleStream(source, encode, block, key, accelerator, **more)


def test_a_pass_has_every_row_once_and_the_next_one_another_order(write):
    found = stream(write(10))
    passes = [found.take(10) for _ in range(3)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert [sorted(passes[0][start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert stream(write(10)).take(25) == [*passes[0], *passes[1], *passes[2][:5]]  # however they are taken
    assert stream(write(10), key=(0, 1)).take(10) != passes[0]


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 9, 10, 11, 14, 20, 33])
def test_a_position_is_enough_to_go_on(write, taken):
    source = write(10)
    first = stream(source)
    first.take(taken)
    position = json.loads(json.dumps(first.state_dict()))
    again = stream(source)
    again.load_state_dict(position)
    assert again.take(30) == first.take(30)


def test_what_is_dropped_and_what_is_bad(write, caplog):
    source = write(30)
    with pytest.raises(UserError, match=r"rows.jsonl:14: bad"):
        stream(source, block=5, encode=number_of).take(20)
    with pytest.raises(UserError, match=r"rows.jsonl:14: bad"):
        stream(source, block=50, encode=number_of)  # in the first block: at once
    kept = stream(source, block=5, encode=number_of, skip_bad_rows=True)
    assert sorted(kept.take(28)) == [n for n in range(30) if n not in (10, 13)]
    kept.take(1)
    assert "skipped 1 bad row" in caplog.text


def test_a_source_that_gives_nothing_is_refused(write):
    with pytest.raises(UserError, match="a pass through it gave no example"):
        stream(write(5), encode=lambda row: []).take(1)
    with pytest.raises(UserError, match="no such file"):
        stream("nowhere.jsonl")


def test_processes_parse_disjoint_shares_and_have_the_same_examples(write, monkeypatch):
    """Two processes as two threads that wait for each other where processes would gather."""
    source, parsed, shares, barrier = write(30), [[], []], {}, threading.Barrier(2, timeout=20)

    def gather(rows, accelerator, group=None):
        shares[accelerator.process_index] = list(rows)
        barrier.wait()
        both = shares[0] + shares[1]
        barrier.wait()
        return both

    def run(rank):
        def encode(row):
            parsed[rank].append(row.row["n"])
            return [row.row["n"]]

        place = SimpleNamespace(num_processes=2, process_index=rank)
        return stream(source, block=7, accelerator=place, encode=encode).take(30)

    monkeypatch.setattr("align.runtime.distributed.gather_rows", gather)
    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(run, (0, 1)))
    assert sorted(parsed[0] + parsed[1]) == list(range(30))
    assert abs(len(parsed[0]) - len(parsed[1])) <= 5  # one in each block of 7
    monkeypatch.undo()
    assert taken == [stream(source, block=7).take(30)] * 2


def test_sources_are_drawn_by_their_weights(write):
    streams = [stream(write(50, f"{n}.jsonl"), key=(3, n), encode=lambda row, n=n: [(n, row.row["n"])]) for n in range(2)]
    batches = StreamedBatches(3, 8, 100, streams, [3.0, 1.0], (0, 0))
    sources = Counter()
    for update in range(1, 101):
        batch = batches.batch(update)
        assert len(batch) == 8
        sources.update(n for n, _ in batch)
    assert abs(sources[0] - 600) < 4 * (800 * 0.75 * 0.25) ** 0.5
    again = StreamedBatches(
        3, 8, 100, [stream(each.source, key=each.key, encode=each.encode) for each in streams], [3, 1], (0, 0)
    )
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    for update in (101, 102):
        assert again.batch(update) == batches.batch(update)


def test_memory_does_not_grow_with_the_file(write):
    peaks = []
    for count in (500, 5_000):
        source = write(count, f"{count}.jsonl", text="x" * 500)
        found = stream(source, block=100)
        tracemalloc.start()
        for _ in range(count // 100):
            found.take(100)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 5_000 * 500 / 4  # a quarter of the file


ROWS = [{"prompt": f"Name the number {n}.", "completion": f"It is {n}."} for n in range(30)]


@pytest.fixture
def demonstrations(tmp_path):
    return write_rows(tmp_path / "demonstrations.jsonl", ROWS)


def test_fine_tuning_on_a_stream(demonstrations, tmp_path, capsys):
    words = f"--model tiny-t5 --train_data {demonstrations} --stream_updates 7 --stream_block 12 --batch_size 5"
    words += f" --dtype float32 --report_to none --learning_rate 1e-2 --output_dir {tmp_path / 'run'} --save_steps 7"
    cli.main(["sft", *words.split()])
    assert "a stream of examples to learn from" in capsys.readouterr().err
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(8))  # 0 is the evaluation before the first
    assert rows[-1]["loss"] < rows[1]["loss"]
    trainer = json.loads((tmp_path / "run" / "checkpoints" / "update-000007" / "trainer.json").read_text())
    # 35 of 30 rows: 5 of the first block of the second pass, which is block 3 over both.
    (position,) = trainer["states"]["batches"]["streams"]
    assert {name: position[name] for name in ("start", "number", "place")} == {"start": 0, "number": 3, "place": 5}


@pytest.mark.parametrize(
    ("data", "more", "complaint"),
    [
        ("", {"num_train_epochs": 2}, "num_train_epochs is 2, but must be 1 with stream_updates"),
        ("", {"mixing_cap": 9}, "mixing_cap is 9"),
        (ROWS, {}, "records in memory need none"),
        ("nowhere.jsonl", {}, "nowhere.jsonl: no such file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, data, more, complaint):
    settings = {"output_dir": str(tmp_path), "report_to": ["none"], "dtype": "float32", "stream_updates": 3, **more}
    with pytest.raises(UserError, match=complaint) as caught:
        SFTTrainer("tiny-llama", data, SFTConfig(**settings))
    assert "\n" not in str(caught.value)


def test_a_resumed_stream_goes_on_to_the_same_bits(demonstrations, tmp_path):
    shared = {"model": "tiny-llama", "train_data": demonstrations, "stream_updates": 6, "stream_block": 7, "batch_size": 4}
    shared |= {"dtype": "float32", "report_to": ["none"], "learning_rate": 1e-2, "save_steps": 2, "save_total_limit": 0}

    def run(folder, **more):
        config = SFTConfig(output_dir=str(tmp_path / folder), **shared, **more)
        SFTTrainer("tiny-llama", demonstrations, config).train()
        rows = read_rows(tmp_path / folder / "metrics.jsonl")
        keys = ("update", "loss", "tokens/read", "grad_norm")
        return [[row[key] for key in keys] for row in rows[1:]]

    whole = run("whole")
    assert run("broken") == whole
    for update in (4, 6):
        shutil.rmtree(tmp_path / "broken" / "checkpoints" / f"update-00000{update}")
    assert run("broken", resume_from_checkpoint=True) == whole
