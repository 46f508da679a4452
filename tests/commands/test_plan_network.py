"""`align plan --update_tokens`: what devices send each other, against figures worked out by hand and in papers."""

import re
from pathlib import Path

import pytest

from align import cli
from align.commands.plan.config import PlanConfig
from align.commands.plan.main import make_plan
from align.commands.plan.network import COUNTS, fastest_that_fits, links_of, resident_bytes, sent_bytes, traffic
from align.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_the_volumes_of_the_zero_paper():
    """Section 7 of Rajbhandari et al. 2020, for many devices in one format: stages 1 and 2 send 2 units, stage 3 sends 3."""
    many = 10**9
    unit = 2 * 7e9  # bytes of all weights in bfloat16
    assert [round(sent_bytes(7e9, many, stage, 1) / unit, 6) for stage in (1, 2, 3)] == [2, 2, 3]
    assert round(sent_bytes(7e9, many, 0, 1) / (4 * 7e9), 6) == 2, "an all-reduce of float32 gradients"


def test_micro_batches_repeat_what_their_stage_repeats():
    # 4 devices, 1000 weights: a gather or a reduction sends 3/4 of 2000 bytes.
    assert [sent_bytes(1000, 4, stage, 5) for stage in range(4)] == [6000, 3000, 9000, 22500]
    assert sent_bytes(1000, 1, 3, 5) == 0


def test_what_is_held_is_the_table_of_the_clusters_page():
    # 2 P weights, 4 T masters, 8 T moments; gradients 4 T without DeepSpeed and 2 T with it.
    assert [resident_bytes(8, 8, stage) for stage in range(4)] == [144, 16 + 12 + 16, 16 + 12 + 2, 2 + 12 + 2]


def test_one_update_by_hand():
    """1 B weights, 262,144 tokens, 16 H100: 6e9 x 262144 / (16 x 989e12 x 0.4) s; 2 x 15/16 x 2e9 bytes at 40 GB/s."""
    (found,) = (
        item for item in traffic(1e9, 262_144, 16_384, "H100", 0.4) if (item.devices, item.strategy) == (16, "ZeRO-1")
    )
    assert found.compute == pytest.approx(0.24850, rel=1e-4)
    assert found.communication == pytest.approx(0.09375)
    assert found.share == pytest.approx(0.09375 / (0.09375 + 0.24850), rel=1e-4)


def test_the_share_of_sending_does_not_depend_on_the_model_and_grows_with_devices():
    small, large = (traffic(size, 262_144, 16_384, "A100-80", 0.4) for size in (1e9, 70e9))
    assert [item.share for item in small] == pytest.approx([item.share for item in large])
    for way in ("whole", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
        shares = [item.share for item in small if item.strategy == way]
        assert shares == sorted(shares)


def test_what_does_not_fit_is_not_taken():
    best = fastest_that_fits(traffic(70e9, 262_144, 16_384, "H100", 0.4))
    assert list(best) == list(COUNTS)
    assert best[16] is None
    assert best[64].strategy == "ZeRO-3"
    assert fastest_that_fits(traffic(7e9, 262_144, 16_384, "H100", 0.4))[8].strategy == "ZeRO-1"


def test_links():
    assert links_of("H100", 0).between == 50e9
    assert links_of("H100", 100).between == 12.5e9
    assert links_of("L4", 0).inside == 31.5e9


def test_the_command_prints_the_table(capsys):
    cli.main(["plan", "--parameters", "7e9", "--update_tokens", "262144", "--gpu", "H100"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("H100, 2.621e+05 tokens an update")
    assert lines[2].split()[:5] == ["devices", "computing", "s", "whole", "ZeRO-1"]
    assert [line.split()[0] for line in lines[3:]] == [str(count) for count in COUNTS]
    assert "no room" in lines[3]


def test_the_table_of_the_clusters_page_is_what_its_command_prints(capsys):
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    command, shown = re.search(r"^    align (plan .*)\n\n```text\n(.*?)\n```", page, re.M | re.S).groups()
    cli.main(command.split())
    assert capsys.readouterr().out.rstrip("\n") == shown


def test_a_model_instead_of_its_size():
    plan = make_plan(PlanConfig(model="tiny-llama", update_tokens=1e4))
    assert {item.devices for item in plan.traffic} == set(COUNTS)


@pytest.mark.parametrize(
    "settings", [{"update_tokens": 1.0}, {"update_tokens": 1.0, "model": "tiny-llama", "gpu": "cpu"}, {"gbits": -1.0}]
)
def test_settings_that_say_too_little(settings):
    with pytest.raises(UserError, match=r"update_tokens|gbits"):
        PlanConfig(**settings)
