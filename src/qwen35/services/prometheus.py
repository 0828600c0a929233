"""Counters as Prometheus metrics, named ``qwen35_*``. Needs prometheus-client (extra ``report``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from qwen35.services.counters import Counters

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class CountersCollector:
    """A collector for ``prometheus_client.registry.CollectorRegistry.register``."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """One counter family for each counter name, one gauge family for each gauge."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, labels, samples in _by_name(self._counters.snapshot()):
            counter = CounterMetricFamily(f"qwen35_{name}", _help(name), labels=labels)
            for label_values, value in samples:
                counter.add_metric(label_values, value)
            yield counter
        for name, labels, samples in _by_name(self._counters.gauges()):
            gauge = GaugeMetricFamily(f"qwen35_{name}", _help(name), labels=labels)
            for label_values, value in samples:
                gauge.add_metric(label_values, value)
            yield gauge


def _help(name: str) -> str:
    return f"qwen35 {name.replace('_', ' ')}"


def _by_name(
    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float],
) -> Iterable[tuple[str, list[str], list[tuple[list[str], float]]]]:
    """Name, label names and samples of each family; a label that a sample lacks is empty."""
    families: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for (name, labels), value in values.items():
        families[name].append((dict(labels), value))
    for name, samples in families.items():
        names = sorted({label for labels, _ in samples for label in labels})
        yield name, names, [([labels.get(n, "") for n in names], value) for labels, value in samples]


def prometheus_text(counters: Counters) -> str:
    """Every counter and gauge in the Prometheus text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(CountersCollector(counters))
    return generate_latest(registry).decode()
