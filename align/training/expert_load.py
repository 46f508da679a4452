"""How evenly the experts of a mixture are used: a metric of every update, and with `router_aux_loss_coef` a loss."""

from collections.abc import Mapping

from torch import Tensor, nn

from align.core.errors import UserError
from align.models.backbone import Backbone
from align.models.backbone.experts import Routing

BALANCE, COUNT = "expert_balance", "expert_count_"
"""Among the sums of an update: the balance, and how often each expert was chosen."""


class ExpertLoad:
    """The experts of the backbone that is trained.

    Args:
        routing: where its tokens go.
        weight: of the balance in the loss.
    """

    def __init__(self, routing: Routing, weight: float) -> None:
        self.routing, self.weight = routing, weight
        self.metrics: dict[str, float] = {}

    @classmethod
    def from_module(cls, module: nn.Module, weight: float) -> "ExpertLoad | None":
        """The experts of the first backbone in a module, which is the policy's; None if it has none.

        Raises:
            UserError: if a model without experts is to balance them.
        """
        backbone = next((part for part in module.modules() if isinstance(part, Backbone)), None)
        routing = backbone.record_routing() if backbone is not None else None
        if backbone is not None and routing is not None and routing.routers:
            return cls(routing, weight)
        if weight:
            name = f"model type '{backbone.model.config.model_type}'" if backbone is not None else "what is trained"
            raise UserError(f"router_aux_loss_coef is {weight:g}, but {name} has no experts; set it to 0")
        return None

    def add(
        self, loss: Tensor, sums: Mapping[str, Tensor | float], rows: int, all_rows: float
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """A micro-batch's loss with its share of the balance, and its sums with the load of the experts.

        Args:
            rows: of the micro-batch.
            all_rows: of the whole batch, over all processes.
        """
        taken = self.routing.take(rows)
        if taken is None:
            return loss, dict(sums)
        balance, counts = taken[0] / all_rows, taken[1]
        found = {BALANCE: balance, **{f"{COUNT}{number}": count for number, count in enumerate(counts)}}
        return loss + self.weight * balance if self.weight else loss, {**sums, **found}

    def keep(self, sums: dict[str, float]) -> None:
        """Take the experts' part out of an update's sums and make metrics of it: an even load is 1."""
        names = [name for name in sums if name.startswith(COUNT)]
        counts = [sums.pop(name) for name in sorted(names, key=lambda name: int(name.removeprefix(COUNT)))]
        load = [count * len(counts) / sum(counts) for count in counts]
        self.metrics = {
            "experts/balance": sums.pop(BALANCE),
            "experts/load_max": max(load),
            "experts/load_min": min(load),
            **{f"experts/load/{number}": value for number, value in enumerate(load)},
        }
