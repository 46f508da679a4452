"""The preparation of a run: what is refused before any response is sampled."""

import pytest

from align.core.errors import UserError
from align.ppo.setup import require_patience


def test_processes_that_wait_for_a_reward_outlast_its_timeout():
    require_patience(299, 300)
    with pytest.raises(
        UserError, match=r"reward_timeout is 300, but the other processes wait for collective_timeout \(300 s\)"
    ):
        require_patience(300, 300)
