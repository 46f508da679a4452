"""The model behind the stand-in, and `LLM`, which holds it in the caller's process."""

import threading
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM


class Model:
    """A causal language model that samples row by row and takes weights by name."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights = dict(self.model.named_parameters())
        self.lock = threading.Lock()

    @torch.no_grad()
    def load_weights(self, named) -> None:
        for name, tensor in named:
            if name not in self.weights or self.weights[name].shape != tensor.shape:
                raise ValueError(f"no weight {name} of shape {list(tensor.shape)}")
            self.weights[name].copy_(tensor)

    @torch.no_grad()
    def generate(self, prompt: list[int], settings) -> tuple[list[int], list[float]]:
        """The row's new tokens, its end included, and the log-prob of each."""
        assert settings.ignore_eos, "the ends of this project alone"
        assert (settings.top_p, settings.top_k) == (1.0, 0)
        generator = torch.Generator().manual_seed(settings.seed)
        ids, seen = list(prompt), []
        with self.lock:
            while len(seen) < settings.max_tokens and (not seen or ids[-1] not in settings.stop_token_ids):
                logits = self.model(torch.tensor([ids])).logits[0, -1] / settings.temperature
                log_probs = logits.log_softmax(-1)
                ids.append(int(torch.multinomial(log_probs.exp(), 1, generator=generator)))
                seen.append(float(log_probs[ids[-1]]))
        return ids[len(prompt) :], seen


class RequestOutput(SimpleNamespace):
    """`prompt_token_ids` and `outputs`, as vLLM has them."""


MADE = []
"""Each `LLM` that was made, for tests to look at."""


class LLM:
    """vLLM in the caller's process."""

    def __init__(self, model: str, **settings) -> None:
        self.settings, self.model, self.seeds, self.loaded, self.resets = settings, Model(model), [], [], 0
        self.states: list[str] = []  # what it was told, in order
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
        MADE.append(self)

    def _load(self, named) -> None:
        self.loaded += [name for name, _ in named]
        self.model.load_weights(named)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts, sampling_params, use_tqdm: bool) -> list[RequestOutput]:
        found = []
        self.states.append("generate")
        for prompt, settings in zip(prompts, sampling_params, strict=True):
            self.seeds.append(settings.seed)
            ids, seen = self.model.generate(prompt["prompt_token_ids"], settings)
            logprobs = [{id: SimpleNamespace(logprob=value, rank=1)} for id, value in zip(ids, seen, strict=True)]
            found.append(RequestOutput(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]))
        return found
