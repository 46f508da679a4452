"""InstructGPT's ptx: language-model loss on demonstrations, added to PPO's so that old skills are not lost."""

from torch import Tensor

from align.batching import micro_batches
from align.encoding import Limits, encode_turns
from align.generation import generator
from align.models.loading import Loaded
from align.ppo.config import PPOConfig
from align.ppo.rollout import PTX
from align.sft.loss import demonstration_loss
from align.tensor_ops import Padded
from align.training import Optimisation, Sums


class Pretraining:
    """Demonstrations that every optimiser step draws a batch from."""

    def __init__(self, config: PPOConfig, loaded: Loaded) -> None:
        self.config = config
        limits = Limits(config.max_prompt_tokens, config.max_prompt_tokens, "truncate")
        self.turns = encode_turns(config.ptx_data, loaded, limits, config.skip_bad_rows)

    def accumulate(self, optimisation: Optimisation, count: int, place: tuple[int, ...]) -> Sums:
        """Add the gradient of ptx_weight times the mean loss of `count` demonstrations drawn for `place`."""
        rows = generator(self.config.seed, PTX, *place).integers(len(self.turns), size=count).tolist()
        learned = sum(sum(self.turns[row].learn) for row in rows)
        device = optimisation.accelerator.device

        def loss(part: list[int]) -> tuple[Tensor, Sums]:
            turns = [self.turns[row] for row in part]
            prompt = Padded.from_lists([turn.prompt for turn in turns]).to(device)
            response = Padded.from_lists([turn.response for turn in turns]).to(device)
            learn = Padded.from_lists([[int(flag) for flag in turn.learn] for turn in turns]).ids.to(device) > 0
            log_probs = optimisation.module("language", prompt, response)
            return self.config.ptx_weight * demonstration_loss(log_probs, learn, ~learn, learned, 0, 0.0), {}

        lengths = [len(self.turns[row].prompt) + len(self.turns[row].response) for row in rows]
        plan = micro_batches(rows, lengths, self.config.micro_batch_tokens, optimisation.accelerator)
        return {"ptx_loss": optimisation.accumulate(plan, loss)["loss"] / self.config.ptx_weight}
