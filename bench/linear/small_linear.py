"""Linears over few rows, as a share of reading their weights at memory speed.

See README.md beside this file.  Prints one table; nothing is written.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from bench.machine import read_bandwidth
from kvell.models.forward.small_linear import (
    MAX_ROWS,
    ONE_THREAD_BYTES,
    instruction_sets,
    small_linear,
)

SMOLLM2 = "576x576,576x192,576x1536,1536x576,576x49152"
CACHES_BYTES = 128 << 20
"""Bytes of distinct weights of one shape, walked in turn, so that no cache holds them."""
MOST_WINT8 = 210
ROUNDS = 5

Weights = Sequence[torch.Tensor]
Way = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Timing:
    """Seconds per walk over all weights: the best and the median of the rounds."""

    best: float
    median: float


def timed_in_turn(walks: dict[str, Callable[[], None]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time all ways in turn, so that a disturbance affects each; a warm-up comes first."""
    seconds: dict[str, list[float]] = {name: [] for name in walks}
    for measured in range(rounds + 1):
        for name, walk in walks.items():
            begin = time.perf_counter()
            walk()
            if measured:
                seconds[name].append(time.perf_counter() - begin)
    return {name: Timing(min(s), statistics.median(s)) for name, s in seconds.items()}


def make_weights(width: int, out: int) -> list[torch.Tensor]:
    """Weights [out, width] in bf16, more than any cache holds."""
    count = min(MOST_WINT8, max(3, CACHES_BYTES // (width * out * 2)))
    return [torch.randn(out, width, dtype=torch.bfloat16) for _ in range(count)]


def walk_over(way: Way, x: torch.Tensor, weights: Weights) -> Callable[[], None]:
    """One call per weight."""

    def walk() -> None:
        for weight in weights:
            way(x, weight)

    return walk


def kernel(instruction_set: str, threads: int) -> Way:
    """The compiled kernel with the threads that the model's module would give it."""

    def way(x: torch.Tensor, weight: torch.Tensor) -> object:
        few = 1 if weight.nbytes < ONE_THREAD_BYTES else threads
        return small_linear(x, weight, None, instruction_set, few)

    return way


def prepacked(x: torch.Tensor, weight: torch.Tensor) -> object:
    """oneDNN over weights that it packed beforehand."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def walks_of(
    rows: int, weights: Weights, sets: Sequence[str], threads: int
) -> dict[str, Callable[[], None]]:
    """Every way over one shape at one number of rows."""
    x = torch.randn(rows, weights[0].shape[1], dtype=torch.bfloat16)
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, rows) for w in weights]
    walks = {name: walk_over(kernel(name, threads), x, weights) for name in sets}
    walks["F.linear"] = walk_over(functional.linear, x, weights)
    walks["prepacked"] = walk_over(prepacked, x, packed)
    return walks


def report(shape: str, rows: Sequence[int], sets: Sequence[str], threads: int, limit: float) -> int:
    """Print a shape's lines; returns the most rows up to which the kernel lost nothing."""
    width, out = (int(size) for size in shape.split("x"))
    weights = make_weights(width, out)
    size_bytes = sum(w.nbytes for w in weights)
    unbeaten, beaten = 0, False
    for count in rows:
        timings = timed_in_turn(walks_of(count, weights, sets, threads))
        cells = (_cell(name, size_bytes, timing, limit) for name, timing in timings.items())
        ratio = timings["F.linear"].best / timings[sets[0]].best
        print(f"{width:>5} → {out:<6} rows {count:>2}  {'  '.join(cells)}  {ratio:4.2f}×")
        beaten = beaten or ratio < 1
        unbeaten = unbeaten if beaten else count
    return unbeaten


def _cell(name: str, size_bytes: int, timing: Timing, limit: float) -> str:
    best, median = size_bytes / timing.best, size_bytes / timing.median
    return f"{name} {best / 1e9:5.1f} ({median / 1e9:5.1f}) {best / limit:4.0%}"


def parse_arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--shapes", default=SMOLLM2, help="in x out, by commas")
    parser.add_argument("--all-sets", action="store_true", help="every instruction set")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sets = instruction_sets() if arguments.all_sets else instruction_sets()[:1]
    limit = read_bandwidth()
    print(f"{arguments.threads} threads, read bandwidth {limit / 1e9:.1f} GB/s")
    print("GB/s of weights: best (median) share of the bandwidth; last: kernel against F.linear")
    rows = [int(count) for count in arguments.rows.split(",")]
    with torch.inference_mode():
        unbeaten = [
            report(shape, rows, sets, arguments.threads, limit)
            for shape in arguments.shapes.split(",")
        ]
    print(f"F.linear does not beat the kernel up to {min(unbeaten)} rows; it is used to {MAX_ROWS}")


if __name__ == "__main__":
    main()
