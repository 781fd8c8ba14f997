"""Llama 3.2 Vision under more and more load: latencies against one page size for all layers.

Questions about an image each, of the mean lengths of MMMU-pro; clients come as a Poisson process.
Rates are multiples of what ``paged`` answers if all wait at the start.
"""

from dataclasses import asdict, dataclass
from statistics import mean

from bench.engine.pressure.figures import Figures
from bench.engine.pressure.virtual import HARDWARE, first_token_seconds, replayed
from bench.replay.shapes import ELEMENT_BYTES, Shape, read_shape
from kvell.load.arrivals import retimed
from kvell.memory import Manager
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow

SHAPE = "llama-3.2-11b-vision"
DEVICE_BYTES = 80 * 10**9
KV_SHARE = 0.9
"""Part of the memory that weights leave, which KV gets."""
SEQS = 256
PARTS = (0.5, 0.9, 1.1, 1.5, 2.0, 3.0)
"""Rates, as multiples of the throughput of ``paged``."""
PAPER = {"latency": 2.24, "ttft": 29.43}
"""The Jenga paper's largest ratios."""


@dataclass(frozen=True)
class AtRate:
    """One rate of a sweep: requests per second, and each manager's mean latencies."""

    part: float
    rate: float
    managers: dict[str, Figures]

    def over(self, figure: str) -> float:
        """``paged`` over Kvell."""
        return self.managers["paged"][figure] / self.managers["kvell"][figure]


def swept(requests: int, seed: int = 0) -> list[AtRate]:
    """Run all rates."""
    shape = read_shape(SHAPE)
    kv_bytes = pool_bytes(shape)
    rows = generate_trace("mmmu-pro", requests, seed)
    run, _ = replayed(shape, "paged", kv_bytes, retimed(rows, rate=float("inf")), SEQS)
    most = requests / run.clock.now_seconds()
    return [at_rate(shape, kv_bytes, rows, part, part * most, seed) for part in PARTS]


def at_rate(
    shape: Shape, kv_bytes: int, rows: list[TraceRow], part: float, rate: float, seed: int
) -> AtRate:
    """Both managers at one rate."""
    sent, managers = retimed(rows, rate=rate, seed=seed), dict[str, Figures]()
    names: tuple[Manager, ...] = ("kvell", "paged")
    for manager in names:
        run, watch = replayed(shape, manager, kv_bytes, sent, SEQS)
        managers[manager] = {
            "latency_seconds": mean(
                (one.finish_seconds or 0.0) - (one.came_seconds or 0.0) for one in run.requests
            ),
            "ttft_seconds": mean(first_token_seconds(one) for one in run.requests),
            "batch": watch.tokens / max(1, watch.steps),
        }
    return AtRate(part, rate, managers)


def pool_bytes(shape: Shape) -> int:
    """KV bytes on a device of 80 GB beside the weights."""
    cost = model_cost(shape.config, shape.description, ELEMENT_BYTES)
    return int(KV_SHARE * (DEVICE_BYTES - cost.weight_bytes))


def as_json(sweep: list[AtRate]) -> dict[str, object]:
    """The sweep as plain data."""
    return {
        "shape": SHAPE,
        "hardware": HARDWARE,
        "paper": PAPER,
        "rates": [
            asdict(one)
            | {f"{name}_over": one.over(f"{name}_seconds") for name in ("latency", "ttft")}
            for one in sweep
        ],
    }
