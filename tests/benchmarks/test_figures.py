import math

from benchmarks.measuring import finish_line
from benchmarks.results import best_variant, memory, row, summarize, update_readme, value
from benchmarks.workloads import ALL, SCALES, WORKS, scaled
from tests.files import write_rows


def line(work, side, seconds, pair=1, variant="auto", tokens=(), gib=1.0, **figures):
    made = {"work": work, "side": side, "variant": variant, "pair": pair, "scale": "cpu", "seconds": list(seconds)}
    made |= {"tokens": list(tokens), "figures": figures, "peak_gib": gib}
    return made | {"wall": 1.0, "commit": "abc", "date": "2026-01-01"}


MACHINE = {"device": "a processor", "cores": 2, "memory_gib": 8.0, "bfloat16_tflops": 1.0, "float32_tflops": 0.5}
MACHINE |= {"python": "3", "torch": "2", "transformers": "5", "trl": {"ppo": "1.12.0"}, "date": "2026-01-01"}


def test_the_race_ends_at_the_first_good_rollout_and_is_not_won_far_from_the_reference():
    won = finish_line([(2.0, 0.1, 0.0), (1.5, 0.79, 9.0), (1.0, 0.8, 20.0), (1.0, 0.9, 30.0)])
    assert (won.seconds, won.figures) == ([4.5], {"kl": 20.0, "updates": 3})
    lost = finish_line([(2.0, 0.1, 0.0), (1.0, 0.7, 9.0)])
    assert (lost.seconds, lost.figures) == ([], {"best_reward": 0.7})

    def raced(side, variant, seconds, kl):
        return line("time_to_reward", side, [seconds], variant=variant, kl=kl, updates=1)

    ours = [raced("ours", "slow", 9.0, 22.0), raced("ours", "middle", 5.0, 27.4), raced("ours", "fast", 2.0, 27.6)]
    peer = [raced("peer", "slow", 30.0, 25.0), raced("peer", "fast", 20.0, 40.0)]
    work = ALL["time_to_reward"]
    assert best_variant(work, ours, peer) == "middle"  # the peer's lowest KL is 25, and 10 % more than that is 27.5
    assert best_variant(work, peer, ours) == "slow"


def test_values_are_per_ranking_and_per_second():
    assert ALL["reward_k4"].rows == 2
    assert value(line("reward_k4", "ours", [3.0, 5.0])) == 2.0
    assert value(line("sft", "ours", [1.0, 3.0], tokens=[100, 500])) == 150.0
    assert value(line("ppo", "ours", [9.0])) == 9.0
    assert value(line("time_to_reward", "ours", [])) == math.inf
    assert memory(line("ppo", "ours", [1.0], gib=3.0)) == 3.0
    assert memory(line("ppo", "ours", [1.0], gib=3.0) | {"peak_device_gib": 40.0}) == 40.0  # a GPU's own counts


def test_later_pairs_repeat_the_fastest_variant():
    sft = [line("sft", "peer", [1.0], variant=name, tokens=[n]) for name, n in (("float32", 10), ("bfloat16", 30))]
    assert best_variant(ALL["sft"], sft, []) == "bfloat16"
    ppo = [line("ppo", "peer", [n], variant=name) for name, n in (("float32", 10), ("bfloat16", 30))]
    assert best_variant(ALL["ppo"], ppo, []) == "float32"
    assert best_variant(ALL["ppo"], [], []) is None


def test_the_table_takes_ratios_pair_by_pair():
    lines = [line("ppo", "ours", [seconds], pair, gib=2.0) for pair, seconds in ((1, 2.0), (2, 4.0), (3, 5.0))]
    lines += [
        line("ppo", "peer", [seconds], pair, "float32", gib=8.0) for pair, seconds in ((1, 20.0), (2, 20.0), (3, 30.0))
    ]
    lines += [line("ppo", "peer", [90.0], 1, "bfloat16", gib=9.0)]
    summary = summarize(ALL["ppo"], lines)
    assert (summary.ours, summary.peer, summary.ratios) == (4.0, 20.0, (10.0, 5.0, 6.0))
    assert " | s an update | 4 | 20 (float32) | 6.0 (5.0-10.0) | 2.00 | 8.00 | 0.25 | 3 |" in row(summary)
    lora = summarize(ALL["ppo_lora"], [*lines, line("ppo_lora", "ours", [4.0], 2)])
    assert lora is None  # without a first pair nothing says which variant counts
    lora = summarize(ALL["ppo_lora"], [*lines, line("ppo_lora", "ours", [4.0], 1)])
    assert lora.ratios == (5.0,)


def test_the_readme_changes_between_its_markers_alone(tmp_path):
    readme, results = tmp_path / "README.md", tmp_path / "cpu.jsonl"
    readme.write_text("before\n<!-- cpu: begin -->\nold\n<!-- cpu: end -->\nafter\n")
    lines = [{"machine": MACHINE}, line("ppo", "ours", [2.0], mfu=0.3), line("ppo", "peer", [8.0], variant="float32")]
    write_rows(results, lines)
    update_readme(readme, results, "cpu")
    text = readme.read_text()
    assert text.startswith("before\n<!-- cpu: begin -->\nModel smollm2-135m. a processor, 2 cores")
    assert text.endswith("<!-- cpu: end -->\nafter\n")
    assert "4.0 (4.0-4.0)" in text
    assert "MFU of ours: ppo 30%." in text
    assert "old" not in text
    update_readme(readme, results, "cpu")
    assert readme.read_text() == text


def test_scales_keep_at_least_one_row_and_two_tokens():
    tiny = scaled(ALL["reward_long"], SCALES["tiny"])
    assert (tiny.rows, tiny.prompt, tiny.response, tiny.responses) == (1, (64, 64), (8, 8), 9)
    assert scaled(ALL["ppo"], SCALES["gpu"]).rows == 128
    assert scaled(ALL["time_to_reward"], SCALES["gpu"]) == ALL["time_to_reward"]
    assert len({work.name for work in WORKS}) == len(WORKS)
