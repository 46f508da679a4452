"""The stored models that a run loads, which must be the same when it resumes."""

from collections.abc import Mapping

from accelerate import Accelerator

from align.core.errors import UserError
from align.models.folders import weights_digest
from align.runtime.distributed import run_on_main


class LoadedModels:
    """Recognizes the models of a checkpoint: a reference or the base of an adapter is not part of the checkpoint itself."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.digests: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Record the weights of a folder, hub name or built-in model. All processes call this."""
        digest = run_on_main(lambda: weights_digest(name), self.accelerator)
        if digest:
            self.digests[name] = digest

    def state_dict(self) -> dict[str, str]:
        """Return the digest of each model's weights by name."""
        return dict(self.digests)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Raise a UserError if a model has other weights than at the time of the checkpoint."""
        for name, digest in self.digests.items():
            if state.get(name, digest) != digest:
                raise UserError(
                    f"model '{name}' has other weights than when this run began; restore them, or start a new run in "
                    "another output_dir"
                )
