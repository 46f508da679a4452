"""Sampling engines behind one interface, and the one that needs nothing but the model that is trained."""

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from align.config import EngineConfig
from align.distributed import map_shared, whole_weights
from align.errors import UserError
from align.generation import Responses, Sampling, noise, sample
from align.models.loading import Loaded
from align.training import Optimisation


class SamplingEngine(Protocol):
    """Samples from the policy as it is now.

    Whatever it reports of probabilities is for a metric alone: what PPO learns from is always scored by the policy itself.
    """

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling, seed: tuple[int, ...]) -> Responses:
        """A response to each prompt, the same on every process; all processes must call it.

        Args:
            prompts: token ids; none may be empty.
            seed: parts of the seed. What decides a row's tokens follows from the seed and the row's number alone.

        Raises:
            UserError: if the engine cannot be used; on every process.
        """
        ...

    def weights_changed(self) -> None:
        """Tell that the policy has learned: the next sample must come from its new weights."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds outside this process."""
        ...


class TransformersEngine:
    """Samples with the trained model itself; processes share the rows."""

    def __init__(self, optimisation: Optimisation, loaded: Loaded) -> None:
        self.optimisation, self.loaded = optimisation, loaded

    def sample(self, prompts: Sequence[list[int]], sampling: Sampling, seed: tuple[int, ...]) -> Responses:
        uniforms, loaded, accelerator = noise(len(prompts), sampling, *seed), self.loaded, self.optimisation.accelerator

        def work(rows: list[int]) -> list[tuple[list[int], bool]]:
            if not rows:
                return []
            mine = [prompts[row] for row in rows]
            found = sample(loaded.backbone, mine, uniforms[rows], sampling, loaded.tokenization.end_ids)
            return list(zip(found.ids, found.ended, strict=True))

        with whole_weights(self.optimisation.module, accelerator), loaded.backbone.adapter(loaded.adapter):
            results = map_shared(range(len(prompts)), work, accelerator)
        return Responses([ids for ids, _ in results], [ended for _, ended in results])

    def weights_changed(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_engine(config: EngineConfig, optimisation: Optimisation, loaded: Loaded, longest: int) -> SamplingEngine:
    """The engine that `config.engine` names.

    Args:
        longest: tokens of the longest prompt and response that will be asked for.

    Raises:
        UserError: if vLLM is not installed or cannot serve this model, or if its server cannot be used.
    """
    if config.engine == "transformers":
        return TransformersEngine(optimisation, loaded)
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"engine {config.engine}: vLLM is not installed where the training runs (it carries the weights to the server "
            "too); pip install 'align-rlhf[vllm]', or use engine transformers"
        )
    loaded.backbone.require_prompt_in_row(f"engine {config.engine}")
    if config.engine == "vllm-server":
        from align.engines.vllm_server import VLLMServer

        return VLLMServer(config, optimisation, loaded, longest)
    from align.engines.vllm_colocate import VLLMColocate

    return VLLMColocate(config, optimisation, loaded, longest)
