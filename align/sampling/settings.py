"""Settings of inference commands (`align sample`, `align eval`) and of sampling engines."""

from dataclasses import dataclass
from typing import Literal

from align.core.errors import UserError
from align.core.settings import Overlong, QuantizationConfig, Settings, group, option, require_setting
from align.data.readers import FewShotPrompt, read_records
from align.data.records import Demonstration
from align.sampling.generation import SamplingParams


@dataclass(kw_only=True)
class InferenceConfig(QuantizationConfig):
    """Model loading and data reading."""

    help_title = "inference"

    seed: int = option(0, "Random seed. Results with the same seed are reproducible.", ge=0, lt=2**32)
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Compute dtype. auto selects bfloat16 if the hardware supports it, else float32."
    )
    batch_tokens: int = option(16384, "Maximum tokens per batch, including padding. Changes results in bfloat16 only.", gt=0)
    chat_template: str = option(
        "auto",
        "Chat template: auto, plain, raw, a template name or the path of a Jinja file. Set template variables in "
        "brackets: auto[VARIABLE=VALUE, ...].",
    )
    skip_bad_rows: bool = option(False, "Skip and count invalid data rows instead of stopping at the first.")


@dataclass(kw_only=True)
class FewShotConfig(Settings):
    """Few-shot examples and an instruction before each prompt."""

    num_few_shot: int = option(
        0,
        "Number of few-shot examples before each prompt, taken from the first single-turn demonstrations of few_shot_data.",
        ge=0,
    )
    few_shot_data: str = option("data/demonstrations.jsonl", "Source of few-shot examples: file, folder or Hub id.")
    instruction: str = option("", "Instruction before the few-shot examples, or before the prompt if there are none.")

    def few_shot_prompt(self) -> FewShotPrompt:
        """Build the few-shot prompt from the first single-turn demonstrations.

        Raises:
            UserError: if the demonstrations cannot be read, or too few are short enough.
        """
        source, count = self.few_shot_data, self.num_few_shot
        records = read_records(source, Demonstration) if count else []
        short = [record for record in records if len(record.prompt) == len(record.continuation) == 1]
        if len(short) < count:
            problem = f"num_few_shot is {count}, but only {len(short)} demonstrations have a single turn"
            raise UserError(f"{source}: {problem}")
        examples = tuple((record.prompt[0]["content"], record.continuation[0]["content"]) for record in short[:count])
        return FewShotPrompt(self.instruction, examples)


@dataclass(kw_only=True)
class AnsweringConfig(Settings):
    """Sampling of responses."""

    help_title = "generation"

    max_new_tokens: int = option(256, "Maximum response length, in tokens.", gt=0)
    max_prompt_tokens: int = option(1024, "Maximum prompt length, in tokens.", gt=0)
    overlong: Overlong = option(
        "error", "How to handle longer prompts: raise an error, drop them, or truncate their beginning."
    )
    temperature: float = option(1.0, "Sampling temperature. 0 for greedy decoding.", ge=0)
    top_k: int = option(0, "Top-k sampling. 0 disables it.", ge=0)
    top_p: float = option(1.0, "Nucleus (top-p) sampling. 1 disables it.", gt=0, le=1)

    def sampling(self, batch_tokens: int) -> SamplingParams:
        """Return the settings as arguments of `sample`."""
        return SamplingParams(self.max_new_tokens, self.temperature, self.top_k, self.top_p, batch_tokens)


@dataclass(kw_only=True)
class VLLMSettings(Settings):
    """Connection to vLLM."""

    url: str = option("http://localhost:8000", "vLLM server URL.")
    timeout: float = option(
        300.0, "Timeout for the vLLM server to start and for each of its responses, in seconds.", gt=0, le=1500
    )
    importance_cap: float = option(
        0.0,
        "Weight each token's policy loss by the truncated importance ratio min(p(policy) / p(vLLM), "
        "importance_cap), and do not stop on a mismatch (Yao et al. 2025: 2). 0 disables it.",
        extension=True,
        ge=1,
        off=0,
    )
    memory_share: float = option(0.3, "Fraction of GPU memory for vllm-colocate (TRL's GRPO: 0.3).", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self, "url", self.url.startswith(("http://", "https://")), "an address such as http://host:8000")


@dataclass(kw_only=True)
class EngineConfig(Settings):
    """Sampling engine. docs/clusters.md shows how to start vLLM."""

    help_title = "sampling engine"

    engine: Literal["transformers", "vllm-server", "vllm-colocate"] = option(
        "transformers",
        "Sampling engine: transformers, a vLLM server on separate GPUs (vllm-server), or vLLM inside the training "
        "processes (vllm-colocate).",
    )
    vllm: VLLMSettings = group(VLLMSettings, "Options of the engines vllm-server and vllm-colocate.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm.importance_cap and self.engine == "transformers":
            raise UserError("vllm.importance_cap must be 0, because engine transformers samples from the policy itself")
