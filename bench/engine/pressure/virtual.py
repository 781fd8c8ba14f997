"""The shapes at their full size in virtual time: the engine's own scheduler and memory core."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from bench.engine.pressure.cases import WANTED, Case, ample_bytes, pressed_bytes
from bench.engine.pressure.figures import Figures
from bench.replay.shapes import ELEMENT_BYTES, Shape, read_shape
from kvell.cli.replay.command import replay_limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import Manager, plan_layout
from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import engine_figures
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_profile
from kvell.simulator.replay.request_figures import RequestFigures
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow

HARDWARE = "h100"
CASES = (
    Case("gemma3-27b", (12_000, 20_000), 1_024, 64, "documents of 16 K tokens"),
    Case("ministral-8b", (55_000, 110_000), 512, 48, "the Jenga paper's figure 15"),
    Case("gpt-oss-20b", (6_000, 10_000), 1_024, 64, "documents of 8 K tokens"),
    Case("falcon-h1-7b", (100, 300), 256, 128, "a chat's first turn"),
)


class DecodeWatch:
    """A machine that also sums the time of steps that only decode."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.request_seconds = machine.request_seconds
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0

    def step_seconds(self, plan: StepPlan) -> float:
        """The machine's seconds for a step."""
        seconds = self._machine.step_seconds(plan)
        if is_decode(plan):
            self.seconds += seconds
            self.tokens += plan.num_logits
            self.steps += 1
        return seconds


def is_decode(plan: StepPlan) -> bool:
    """Whether every request of the step computes one token and yields the next."""
    return bool(plan.work) and all(work.count == 1 and work.samples for work in plan.work)


def replayed(
    shape: Shape, manager: Manager, kv_bytes: int, rows: Sequence[TraceRow], max_num_seqs: int
) -> tuple[VirtualCluster, DecodeWatch]:
    """Replay the rows to their end."""
    description = shape.description
    layout = plan_layout(description.layers, kv_bytes, manager=manager)
    cost = model_cost(shape.config, description, ELEMENT_BYTES)
    watch = DecodeWatch(Machine(load_profile(HARDWARE), cost))
    limits = replace(replay_limits(layout, description.max_model_len), max_num_seqs=max_num_seqs)
    run = VirtualCluster(
        ClusterSpec(ALONE, layout, limits, watch),
        rows,
        prompts=PromptMaker(rows, shape.images_in_text),
        metering=Metering(description.layers),
    )
    run.run()
    if refused := len(rows) - run.front.num_finished:
        raise RuntimeError(f"{shape.name}: {manager} refuses {refused} requests")
    return run, watch


def figures(run: VirtualCluster, watch: DecodeWatch, rows: Sequence[TraceRow]) -> Figures:
    """Figures of one run; latencies are means."""
    report = engine_figures(run)
    return {
        "decode_tokens_per_second": watch.tokens / watch.seconds if watch.seconds else 0.0,
        "output_tokens_per_second": report["output_tokens_per_second"],
        "batch": watch.tokens / max(1, watch.steps),
        "ttft_seconds": mean(first_token_seconds(one) for one in run.front.requests),
        "tpot_seconds": mean(map(token_seconds, run.front.requests, rows)),
        "preemptions": report["preemptions"],
    }


def first_token_seconds(one: RequestFigures) -> float:
    """Seconds from a request's arrival to its first token."""
    assert one.first_token_seconds is not None and one.came_seconds is not None
    return one.first_token_seconds - one.came_seconds


def token_seconds(one: RequestFigures, row: TraceRow) -> float:
    """Mean seconds per token after the first."""
    assert one.first_token_seconds is not None and one.finish_seconds is not None
    return (one.finish_seconds - one.first_token_seconds) / max(1, row.output_tokens - 1)


def measured(case: Case, manager: Manager, *, pressed: bool, seed: int = 0) -> Figures:
    """One manager on one shape."""
    shape = read_shape(case.shape)
    layers = shape.description.layers
    kv_bytes = pressed_bytes(layers, case) if pressed else ample_bytes(layers, case)
    rows = [TraceRow(0.0, tokens, case.output_tokens) for tokens in case.prompts(seed)]
    run, watch = replayed(shape, manager, kv_bytes, rows, WANTED)
    return figures(run, watch, rows) | {"kv_gib": kv_bytes / 2**30}
