"""Settings of commands that use a finished model (`align sample`, `align eval`), and of sampling engines."""

from dataclasses import dataclass
from typing import Literal

from align.core.errors import UserError
from align.core.settings import Overlong, Settings, group, option, require_setting
from align.data.readers import FewShotPrompt, read_records
from align.data.records import Demonstration
from align.sampling.generation import SamplingParams


@dataclass(kw_only=True)
class InferenceConfig(Settings):
    """How models are loaded and rows are read."""

    help_title = "models and rows"

    seed: int = option(0, "seed of all random numbers; the same seed gives the same results", ge=0, lt=2**32)
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "number format of computations; auto: bfloat16 if the hardware supports it, else float32"
    )
    batch_tokens: int = option(
        16384, "padded prompt and response tokens in memory at once; results depend on it in bfloat16, not in float32", gt=0
    )
    chat_template: str = option(
        "auto", "chat template: auto, plain, raw, a name or the path of a Jinja file; auto[VARIABLE=VALUE, ...]"
    )
    skip_bad_rows: bool = option(False, "leave out rows that cannot be read instead of stopping at the first")


@dataclass(kw_only=True)
class FewShotConfig(Settings):
    """Examples and an instruction that a model reads before each prompt."""

    num_few_shot: int = option(
        0, "few-shot examples before each prompt: the first demonstrations of few_shot_data with a single turn", ge=0
    )
    few_shot_data: str = option("data/demonstrations.jsonl", "where the examples come from: file, folder or hub name")
    instruction: str = option("", "text before the first example, or before the prompt where there is none")

    def few_shot_prompt(self) -> FewShotPrompt:
        """Return the instruction and the first demonstrations that have one user turn and one answer.

        Raises:
            UserError: if the demonstrations cannot be read, or fewer of them are so short.
        """
        source, count = self.few_shot_data, self.num_few_shot
        records = read_records(source, Demonstration) if count else []
        short = [record for record in records if len(record.prompt) == len(record.continuation) == 1]
        if len(short) < count:
            problem = f"num_few_shot is {count}, but only {len(short)} of its demonstrations have a single turn"
            raise UserError(f"{source}: {problem}")
        examples = tuple((record.prompt[0]["content"], record.continuation[0]["content"]) for record in short[:count])
        return FewShotPrompt(self.instruction, examples)


@dataclass(kw_only=True)
class AnsweringConfig(Settings):
    """How responses to prompts are sampled."""

    help_title = "generation"

    max_new_tokens: int = option(256, "longest response, in tokens", gt=0)
    max_prompt_tokens: int = option(1024, "longest prompt, in tokens", gt=0)
    overlong: Overlong = option("error", "what happens to a longer prompt: error, drop it, or truncate its beginning")
    temperature: float = option(1.0, "sampling temperature; 0: the likeliest token", ge=0)
    top_k: int = option(0, "sample from the k likeliest tokens; 0: from all", ge=0)
    top_p: float = option(
        1.0, "sample from the likeliest tokens whose probabilities sum to this share; 1: from all", gt=0, le=1
    )

    def sampling(self, batch_tokens: int) -> SamplingParams:
        """Return the same settings as `sample` takes them."""
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_k, self.top_p, batch_tokens)


@dataclass(kw_only=True)
class VLLMSettings(Settings):
    """How vLLM is reached or run."""

    url: str = option("http://localhost:8000", "address of the vLLM server")
    timeout: float = option(
        300.0, "seconds to wait for the vLLM server to start, and for each of its answers", gt=0, le=1500
    )
    importance_cap: float = option(
        0.0,
        "weight each token's policy loss by min(p(policy) / p(vLLM), importance_cap) and continue despite any mismatch "
        "(Yao et al. 2025: 2); 0: no weights",
        ge=1,
        off=0,
    )
    memory_share: float = option(0.3, "share of a GPU's memory that vllm-colocate takes (TRL's GRPO: 0.3)", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "url", self.url.startswith(("http://", "https://")), "an address such as http://host:8000")


@dataclass(kw_only=True)
class EngineConfig(Settings):
    """The engine that samples rollouts; docs/clusters.md describes how to start vLLM."""

    help_title = "sampling engine"

    engine: Literal["transformers", "vllm-server", "vllm-colocate"] = option(
        "transformers",
        "sampling engine: transformers with the trained model, a vLLM server on separate GPUs, or vLLM inside the training "
        "processes",
    )
    vllm: VLLMSettings = group(VLLMSettings, "vLLM, for the engines vllm-server and vllm-colocate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm.importance_cap and self.engine == "transformers":
            raise UserError("vllm.importance_cap must be 0, because engine transformers samples from the policy itself")
