"""50 labelers at once while the server is killed three times: nothing that was acknowledged is lost or doubled."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.annotation_load import Result, check, label, set_up
from tests.annotation_ui.running import Server

BETWEEN_KILLS, KILLS, ITEMS = 150, 3, 20_000
LABELERS, LONGEST_S = 50, 300


@pytest.mark.slow
def test_acknowledged_judgments_survive_kills(database_url, tmp_path):
    server = Server(database_url, tmp_path)
    with server.started():
        tokens = set_up(server.database, LABELERS, items=ITEMS)
        result, stopped = Result(), threading.Event()

        def wait_for_judgments():
            enough = len(result.acknowledged) + BETWEEN_KILLS
            while len(result.acknowledged) < enough and not stopped.is_set():
                time.sleep(0.02)

        def kill_and_start():
            for _ in range(KILLS):
                wait_for_judgments()
                server.kill()
                server.start()
            wait_for_judgments()
            stopped.set()

        killer = threading.Thread(target=kill_and_start)
        killer.start()
        try:
            with ThreadPoolExecutor(1) as pool:  # playwright's tests leave an event loop running in this thread
                pool.submit(asyncio.run, label(server.port, tokens, LONGEST_S, 0.3, result, stopped)).result()
        finally:
            stopped.set()
            killer.join()
        assert server.process.is_alive()
    assert len(result.acknowledged) >= (KILLS + 1) * BETWEEN_KILLS
    check(server.database, result.acknowledged)
