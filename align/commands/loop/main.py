"""The command `align loop`."""

import time
from pathlib import Path

from align.commands.loop.config import LoopConfig
from align.commands.loop.rounds import Loop, say, summary


def run_loop(config: LoopConfig) -> Path:
    """Run or resume a loop until its rounds are done or labels are missing; returns its folder.

    Raises:
        UserError: for a mistake in the settings, the data or the labels.
    """
    loop, rounds = Loop(config), range(1, config.rounds + 1)
    for number in rounds:
        while missing := loop.run_round(number):
            say([f"round {number} waits for labels: {missing}"])
            if not config.poll_seconds:
                say(["start the same command again when they are there"])
                return loop.folder
            time.sleep(config.poll_seconds)
    say(summary(loop.state.steps, rounds))
    return loop.folder
