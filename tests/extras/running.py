"""What the tests of the stages in extras share: settings of a short run, commands in one line, a simulated labeler."""

from align import cli
from tests.settings import run_settings

TINY = "--model tiny-llama --dtype float32 --report_to none"


def settings(folder, **more):
    """Settings of a short run in float32."""
    return run_settings(folder, learning_rate=3e-3) | more


def command(words):
    """Run `align` with the words of a line."""
    cli.main(words.split())


def code_points(prompts, responses):
    """The sum of a response's code points: a simulated labeler that is hardly ever undecided."""
    return [float(sum(map(ord, response))) for response in responses]
