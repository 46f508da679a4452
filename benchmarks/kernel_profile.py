"""Where a GPU's time goes in a piece of our work: `python -m benchmarks.kernel_profile FOLDER ppo_opt [--rows 64]`.

The table has the kernels with the most time, of all steps together with the loading before them. FOLDER is made by
`benchmarks.data` with the scale `gpu`.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import measure
from benchmarks.workloads import ALL, SCALES, scaled

SHOWN, NAME_LENGTH = 25, 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("work", choices=ALL)
    parser.add_argument("--rows", type=int, help="in place of the work's own: a profile keeps every kernel in memory")
    parser.add_argument("--tokens", type=int, help="new tokens of a response, likewise")
    words = parser.parse_args()
    work = scaled(ALL[words.work], SCALES["gpu"])
    response = (words.tokens, words.tokens) if words.tokens else work.response
    work = replace(work, rows=words.rows or work.rows, response=response)
    with tempfile.TemporaryDirectory() as scratch, profile(activities=[ProfilerActivity.CUDA]) as profiled:
        found = measure("ours", work, "auto", words.folder, 1, Path(scratch))
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in kernels)
    print(f"{work.name}, {work.rows} rows: {found}\nkernels {total / 1e6:.2f} s")
    for row in kernels[:SHOWN]:
        share, seconds = row.self_device_time_total / total, row.self_device_time_total / 1e6
        print(f"{share:6.1%} {seconds:8.3f} s {row.count:8d} x {row.key[:NAME_LENGTH]}")


if __name__ == "__main__":
    main()
