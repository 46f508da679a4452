"""The common base of the trainers of models with scalar heads: reward, rule and attribute models."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from align.batches.mixtures import MixedExamples
from align.models.roles import REWARD_ADAPTER
from align.reward.checkpoint import require_savable_classifier
from align.reward.scoring import batch_shape_of, group_sizes
from align.runtime.distributed import run_on_main
from align.tokenization.encoded import SharedPrompt
from align.training.epochs import EpochConfig
from align.training.optimization import Optimization
from align.training.start import Model
from align.training.trainer import EpochTrainer

Ranked = TypeVar("Ranked", bound=SharedPrompt)


class HeadTrainer(EpochTrainer):
    """Base of a trainer whose model reads a prompt with all of its responses, and a number after each response.

    Args:
        config: the stage's settings; the other arguments are those of `EpochTrainer`.

    Raises:
        UserError: if the model cannot be loaded, or has no hidden states that a head could read.
    """

    def __init__(
        self, config: EpochConfig, stage: str, model: Model, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        super().__init__(config, stage, model, tokenizer, REWARD_ADAPTER, allow_reward_model=True)
        run_on_main(lambda: require_savable_classifier(self.loaded), self.run.accelerator)

    def optimize_heads(
        self,
        module: nn.Module,
        mixed: MixedExamples[Ranked],
        held_out: Sequence[Ranked],
        predicted: Callable[[Ranked], Sequence[int]] | None = None,
    ) -> Optimization:
        """`make_optimization` for prompts with their responses.

        Args:
            predicted: tokens of each response that a language-model loss is taken on; None: there is none.
        """
        tokens, shape = partial(group_sizes, self.loaded.backbone), partial(batch_shape_of, predicted=predicted)
        return self.make_optimization(module, mixed, held_out, tokens, shape, takes_logits=predicted is not None)
