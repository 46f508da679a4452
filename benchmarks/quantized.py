"""Memory and speed of PPO with all weights, with LoRA, and with LoRA on an 8-bit and a 4-bit base.

    python -m benchmarks.quantized [VARIANT ...]

Each variant runs in a separate process: SmolLM2-135M, two updates of 8 responses of 32 tokens, one epoch each. Speed is
measured for one update after the first rollout, in response tokens per second of CPU time, so that other work on the machine
does not affect it. Memory is the peak resident size of the process. The result is printed as a Markdown table.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

LORA: dict[str, Any] = {"lora_r": 16, "learning_rate": 1e-4}
VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "all weights, adamw_8bit": {"optimizer": "adamw_8bit"},
    "LoRA": LORA,
    "LoRA, 8-bit base": LORA | {"load_in_8bit": True},
    "LoRA, 4-bit base": LORA | {"load_in_4bit": True},
}
UPDATES, RESPONSES, TOKENS = 2, 8, 32


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Run PPO in this process. Return the peak memory in GiB and the response tokens per second of CPU time."""
    from align.ppo import PPOConfig, PPOTrainer

    marks: list[float] = []

    def share_of_e(prompts: Any, responses: Any) -> list[float]:  # called once per update
        marks.append(time.process_time())
        return [text.count("e") / max(1, len(text)) for text in responses]

    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            total_updates=UPDATES,
            rollout_batch_size=RESPONSES,
            num_ppo_epochs=1,
            max_prompt_tokens=128,
            overlong="drop",
            max_new_tokens=TOKENS,
            ignore_eos=True,
            missing_eos_score=None,
            report_to=["none"],
            output_dir=f"{folder}/run",
            **settings,
        )
        PPOTrainer("smollm2-135m", [share_of_e], "data/prompts.jsonl", config).train()
    seconds = (marks[-1] - marks[0]) / (len(marks) - 1)
    return {
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "tokens/s": RESPONSES * TOKENS / seconds,
    }


def main() -> None:
    """Measure the variants named on the command line, each in a separate process, and print a table."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(VARIANTS[sys.argv[2]])))
        return
    rows = []
    for name in sys.argv[1:] or VARIANTS:
        words = [sys.executable, "-m", "benchmarks.quantized", "--child", name]
        found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
        rows.append(f"| {name} | {found['GiB']:.2f} | {found['tokens/s']:.1f} |")
        print(rows[-1], file=sys.stderr)
    print("\n".join(["| PPO of SmolLM2-135M | peak GiB | tokens/s |", "| --- | --- | --- |", *rows]))


if __name__ == "__main__":
    main()
