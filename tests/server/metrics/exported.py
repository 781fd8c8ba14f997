"""What a real server's ``/metrics`` shows, with all parts of it in use that have metrics."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_SECONDS = 120.0
FLAGS = (
    *("--memory", "700MiB", "--cpu-buffer", "64MiB"),
    *("--slo-ttft", "1", "--slo-tpot", "0.1"),
)
"""KV cache and activations share a pool, there is a CPU buffer, and prompts go ahead."""


@dataclass(frozen=True)
class Exported:
    """Metrics by the names that queries use; counters end in ``_total``.

    :param labels: of every metric that has samples; those of a histogram have no ``le``.
    :param series: labels of every sample name, ``…_bucket``, ``…_sum`` and ``…_count`` too.
    :param values: that a label of a sample name has.
    """

    metrics: frozenset[str]
    labels: dict[str, frozenset[str]]
    series: dict[str, frozenset[str]]
    values: dict[tuple[str, str], frozenset[str]]

    @classmethod
    def of(cls, families: Iterable[Metric]) -> "Exported":
        """Sort what was read; when a series was created is left out."""
        labels: dict[str, frozenset[str]] = {}
        series: dict[str, frozenset[str]] = {}
        values: dict[tuple[str, str], frozenset[str]] = {}
        metrics: set[str] = set()
        for family in families:
            if family.name.endswith("_created"):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            metrics.add(name)
            for sample in family.samples:
                series[sample.name] = frozenset(sample.labels)
                labels[name] = frozenset(sample.labels) - {"le"}
                for label, value in sample.labels.items():
                    before = values.get((sample.name, label), frozenset())
                    values[sample.name, label] = before | {value}
        return cls(frozenset(metrics), labels, series, values)


def exported_by_a_server(cache_dir: Path) -> Exported:
    """Start a server, let it answer one prompt, and read its metrics.

    :param cache_dir: where the packaged model lies.
    """
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json", *FLAGS]
    environment = os.environ | {"KVELL_CACHE_DIR": str(cache_dir)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"prompt": "The capital of France is", "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).raise_for_status()
        page = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).raise_for_status().text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    return Exported.of(text_string_to_metric_families(page))
