"""A child process with a real engine core and memory core, and no model: steps take a fixed time.

Full, sliding and state layers share the pool with the activations of its steps.
"""

import argparse
import socket
import sys
import time
import zlib
from dataclasses import replace

from kvell.elastic.arena import ActivationModel
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling
from kvell.engine.core.core import EngineCore
from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.core.page_map import PageMap
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.setup.contract import make_contract
from kvell.memory import GroupKind, LayerSpec, Layout, create_core, plan_layout
from kvell.serving.lone import serve_instance
from tests.device.fake_chunks import FakeChunks

MODEL_LEN = 4096
CHUNK_BYTES = 1 << 18
LAYERS = [
    *(LayerSpec(i, GroupKind.FULL, 4, 64, 2) for i in range(2)),
    *(LayerSpec(i, GroupKind.SLIDING, 4, 64, 2, window_tokens=256) for i in range(2, 6)),
    *(LayerSpec(i, GroupKind.STATE, 0, 0, 2, state_bytes=32 << 10) for i in range(6, 10)),
]


class Paced:
    """Makes letters, a function of the request and the position alone."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(self._step_seconds if plan.work else 0.001)
        tokens = tuple(
            ord("a") + zlib.crc32(f"{work.request_id} {work.output_index}".encode()) % 26
            for work in plan.work
            if work.samples
        )
        return StepResult(plan.step, tokens)


def layout_of(num_large: int) -> Layout:
    large_bytes = plan_layout(LAYERS, 1 << 30).large_page_bytes
    return plan_layout(LAYERS, large_bytes * num_large)


def make_engine(num_large: int, step_seconds: float, incarnation: int = 0) -> Engine:
    layout = layout_of(num_large)
    limits = Limits(256, 32, MODEL_LEN, 256, min_chunk_tokens=16)
    core = create_core(layout)
    num_chunks = -(-layout.pool_bytes // CHUNK_BYTES)
    tiling = Tiling(num_chunks, CHUNK_BYTES, layout.large_page_bytes, layout.num_large_pages)
    chunks = FakeChunks(num_chunks, CHUNK_BYTES, has_bytes=False)
    need = ActivationModel(fixed_bytes=CHUNK_BYTES, token_bytes=16 << 10, logits_row_bytes=1 << 10)
    shared = SharedMemory(core, ElasticMemory(chunks, core, tiling), need)
    engine_core = EngineCore(
        core, limits, frozenset({0}), incarnation, memory=shared, misses=MissWatch(core)
    )
    return Engine(
        engine_core,
        Paced(step_seconds),
        replace(make_contract("fake", layout, 0, 0, MODEL_LEN), dtype="float32"),
        need,
        incarnation=incarnation,
        page_map=PageMap(engine_core, core),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--large-pages", type=int, default=600)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    args = parser.parse_args()
    engine = make_engine(args.large_pages, args.step_seconds, args.incarnation)
    with socket.socket(fileno=args.socket_fd) as sock:
        serve_instance(engine, sock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
