"""50 labelers at once while the server is killed three times: nothing that was acknowledged is lost or doubled.

20 seconds of labelling a database here; the full 60 with ALIGN_FULL=1, as continuous integration runs it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.annotation_load import check, label, set_up

from .running import Server

SECONDS = 60 if os.environ.get("ALIGN_FULL") == "1" else 20
LABELERS, KILLS = 50, 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_acknowledged_judgments_survive_three_kills(database_url: str, tmp_path: Path) -> None:
    server = Server(database_url, tmp_path)
    with server.started():
        tokens = set_up(server.database, LABELERS, items=20_000)
        stopped = threading.Event()

        def kill_and_start() -> None:
            for _ in range(KILLS):
                if stopped.wait(SECONDS / (KILLS + 1)):
                    return
                server.kill()
                server.start()

        killer = threading.Thread(target=kill_and_start)
        killer.start()
        try:
            with ThreadPoolExecutor(1) as pool:  # playwright's tests leave an event loop running in this thread
                result = pool.submit(asyncio.run, label(server.port, tokens, SECONDS, pause=0.3)).result()
        finally:
            stopped.set()
            killer.join()
        assert server.process is not None
        assert server.process.poll() is None
    assert len(result.acknowledged) > 10 * LABELERS * SECONDS / 60
    check(server.database, result.acknowledged)
