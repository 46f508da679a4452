"""Device hours, energy, CO2e and price of a run, from its time and the settings of its devices."""

import json
from pathlib import Path

from align.core.settings import RunConfig
from align.models.checkpoint import EMISSIONS

HOURS = "cost/device_hours"


def cost_metrics(config: RunConfig, device_hours: float) -> dict[str, float]:
    """Return the costs of a run; empty if neither power nor price of its devices is known.

    Args:
        device_hours: hours times processes, since the first start of the run.
    """
    if not config.device_watts and not config.price_per_hour:
        return {}
    metrics, kwh = {HOURS: device_hours}, device_hours * config.device_watts / 1000
    if config.device_watts:
        metrics["cost/kwh"] = kwh
    if config.device_watts and config.co2e_per_kwh:
        metrics[EMISSIONS] = kwh * config.co2e_per_kwh
    if config.price_per_hour:
        metrics["cost/price"] = device_hours * config.price_per_hour
    return metrics


def hours_in(metrics: Path) -> float:
    """Return the device hours in the last complete line of a metrics file; 0 without a file or without them.

    Lines after the resumed checkpoint count too: their updates are repeated, but were paid for.
    """
    hours = 0.0
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        try:
            hours = float(json.loads(line)[HOURS])
        except (ValueError, KeyError, TypeError):  # a line that was cut short by a kill
            continue
    return hours
