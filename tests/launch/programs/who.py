"""Prints the ranks that this process hears from, how many it knows of, and its device."""

import sys

import torch

from align.runtime.distributed import gather_rows, make_accelerator

found = make_accelerator(torch.float32, 1.0)
heard = gather_rows([found.process_index], found)
# Rows of other lengths, some empty, all of them on one process: 0, 2 and 4 on the first, 1 and 3 on the second.
rows = [torch.arange(2.0 * length).reshape(2, length) - number for number, length in enumerate((3, 0, 1, 5, 2))]
own = {number: row for number, row in enumerate(rows) if number % 2 == found.process_index}
everywhere = dict(gather_rows(list(own.items()), found))
assert all(torch.equal(everywhere[number], row) for number, row in enumerate(rows))
sys.stdout.write(f"{heard} {found.num_processes} {found.device.type}\n")  # at once: another process writes there too
torch.distributed.destroy_process_group()
