"""`align serve-reward`: serve a reward model over HTTP, with the interfaces of other frameworks."""

from dataclasses import dataclass
from typing import Literal

from align.core.errors import UserError
from align.core.settings import Settings, option, require_setting
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardService


@dataclass(kw_only=True)
class ServeRewardConfig(Settings):
    """Settings of `align serve-reward`."""

    reward_model: str = option("", "folder of a reward model, or of any transformers classifier with one label")
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every network of this machine, without a password")
    port: int = option(8300, "port to listen on")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "number format that the model computes in")
    batch_tokens: int = option(8192, "padded tokens that are read at once")

    def __post_init__(self) -> None:
        require_setting(self, "reward_model", bool(self.reward_model), "given")
        require_setting(self, "port", 0 < self.port < 65536, "from 1 to 65535")
        require_setting(self, "batch_tokens", self.batch_tokens > 0, "above 0")


def run_serve_reward(config: ServeRewardConfig) -> None:
    """Load the reward model and answer requests until the process is stopped.

    Raises:
        UserError: if a package is missing, the folder is not a reward model or the port is taken.
    """
    try:
        import uvicorn

        from align.commands.reward_api import make_api
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; install the extra: pip install 'align-rlhf[serve]'") from error
    reward = load_reward_model(config.reward_model, config.dtype)
    service = RewardService(reward, config.batch_tokens)
    server = uvicorn.Server(
        uvicorn.Config(make_api(service, config.reward_model), config.host, config.port, log_level="warning")
    )
    try:
        print(f"reward model {config.reward_model} at http://{config.host}:{config.port}; stop it with Ctrl-C", flush=True)
        server.run()
    except SystemExit:  # uvicorn has said why on its log, with its own exit code
        raise UserError(f"cannot listen on {config.host}:{config.port}; give another --port") from None
    finally:
        service.close()
