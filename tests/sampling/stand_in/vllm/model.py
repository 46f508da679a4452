"""The model behind the stand-in."""

import threading

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
