"""Time block sizes on this GPU.  Prints a line for each; nothing is written."""

import argparse
import time

import torch

from bench.gpu.place import Place
from bench.gpu.sizes import DECODES, Heads
from bench.gpu.speed import decode, one_layer, prefill
from bench.gpu.timing import read_bandwidth
from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import Blocks, HeadShape, long_blocks, short_blocks

GPU = Place.of(pretends=False)
Config = tuple[str, tuple[Blocks, Blocks]]
SHORT = ((64, 4, 3), (64, 4, 2), (64, 4, 1), (64, 8, 3), (64, 8, 1), (32, 4, 3), (32, 4, 1),
         (32, 2, 2), (64, 2, 2), (32, 8, 2), (128, 8, 1))  # fmt: skip
LONG = ((128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 8, 1))
SIZES = ((8, 2048), (32, 4096), (8, 8192), (1, 32_768))


def usual_blocks(heads: Heads) -> tuple[Blocks, Blocks]:
    """The block sizes that the kernels choose themselves."""
    layer = one_layer(heads)
    shape = HeadShape.of(layer, heads.heads)
    return short_blocks(layer, shape, torch.bfloat16), long_blocks(layer, shape, torch.bfloat16)


def decode_configs(heads: Heads) -> list[Config]:
    """Names and block sizes for short requests."""
    short, usual = usual_blocks(heads)
    rows = {short.rows, 64} if short.rows < 64 < 2 * heads.heads // heads.kv_heads else {short.rows}
    return [
        (
            f"{heads.name} M={m} N={span} w={warps} s={stages}",
            (Blocks(m, span, warps, stages), usual),
        )
        for m in sorted(rows)
        for span, warps, stages in SHORT
    ]


def prefill_configs(heads: Heads) -> list[Config]:
    """Names and block sizes for long requests."""
    usual, _ = usual_blocks(heads)
    return [
        (
            f"{heads.name} M={rows} N={span} w={warps} s={stages}",
            (usual, Blocks(rows, span, warps, stages)),
        )
        for rows, span, warps, stages in LONG
    ]


def run_decode(config: Config, heads: Heads, bandwidth: float, tiny: bool) -> str:
    """Run decodes; return their shares of the bandwidth as text."""
    found = []
    for requests, context in ((2, 512),) if tiny else SIZES:
        row = decode(GPU, TritonKernels(config[1]), heads, requests, context)
        found.append(
            f"{requests}x{context} {row['bytes_per_second'] / bandwidth:.0%}"
            f" ({row['microseconds']:.0f}/{row['microseconds_with_launches']:.0f} us)"
        )
    return "  ".join(found)


def run_prefill(config: Config, heads: Heads, bandwidth: float, tiny: bool) -> str:
    """Run prefills; return their TFLOP/s as text."""
    requests, context = (1, 256) if tiny else (4, 4096)
    row = prefill(GPU, TritonKernels(config[1]), heads, requests, context)
    return "  ".join(f"{k} {v / 1e12:.0f}" for k, v in row.items() if isinstance(v, float))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=0, help="which of sizes.DECODES")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm", type=int, nargs=2, help="only compile every n-th from the i-th")
    options = parser.parse_args()
    heads = DECODES[options.heads]
    bandwidth = 1.0 if options.warm else read_bandwidth(GPU)
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s")
    for kind, configs, run in (
        ("decode", decode_configs(heads), run_decode),
        ("prefill", prefill_configs(heads), run_prefill),
    ):
        until = time.monotonic() + options.seconds
        for config in configs[options.warm[0] :: options.warm[1]] if options.warm else configs:
            if time.monotonic() > until:
                break
            try:
                said = run(config, heads, bandwidth, bool(options.warm))
            except Exception as error:  # too much shared memory, say
                said = f"{type(error).__name__}: {str(error)[:60]}"
            print(kind, config[0], said, flush=True)


if __name__ == "__main__":
    main()
