"""A draft model and its target model in one pool, by memory manager, in virtual time.

The set-up is that of Jenga §7.4, fig. 19: ``max-page`` has one page size, that of the larger
model (vLLM-max); ``manual`` cuts memory at start by bytes per token and pages each model by
itself (vLLM-manual, as SmartSpec does); ``kvell`` lets both models' groups share all of it.
Draft tokens are accepted at one rate for all, so that managers differ by memory alone.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kvell.cli.replay.command import replay_limits
from kvell.cli.replay.models import DraftTokens, read_models
from kvell.cli.terminal.session import Session
from kvell.clock import MonotonicClock
from kvell.memory import Manager, create_core, plan_layout
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE as HARDWARE
from kvell.simulator.hardware.profiles import load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Acceptance, Machine
from kvell.simulator.traces.drawing import unrelated
from kvell.simulator.traces.trace import TraceRow, read_trace
from kvell.vocabulary import GIB

ELEMENT_BYTES = 2
DRAFTED_TOKENS = 4
ACCEPTANCE = 0.7
MANAGERS: tuple[Manager, ...] = ("kvell", "manual", "max-page")
SMALL = "drafts/llama-3.2-1b"
PAPER_MEAN = 1.58
"""Throughput over vLLM-manual on models of mixed layers, on average (Jenga §7.4)."""
SAME = 0.01
FIGURES = (
    *("requests_finished", "requests_refused", "steps", "batch_mean", "batch_saturated_mean"),
    *("waste", "stranded", "hit_rate", "preemptions", "kv_memory_bytes", "virtual_seconds"),
    *("output_tokens", "output_tokens_per_second", "spec_decode_drafts"),
    *("spec_decode_draft_tokens", "spec_decode_accepted_tokens"),
)
AZURE = "azure-2023-conv"
AZURE_REQUESTS = 120
REASONING = "reasoning"
REASONING_REQUESTS = 48
ANSWER_TOKENS = (500, 1_500)
"""Long answers about documents: time goes into decoding, which draft tokens speed up."""


@dataclass(frozen=True)
class Pair:
    """A model, its draft model, and the memory of both.

    :param is_mixed: whether the model's layers differ in what they keep.
    :param document_tokens: shortest and longest prompt of the drawn workload, beyond the
        windows of the model's layers.
    """

    model: str
    draft: str
    memory_gib: int
    is_mixed: bool = True
    document_tokens: tuple[int, int] = (2_048, 16_384)


PAIRS = (
    Pair("llama3-8b", SMALL, 16, is_mixed=False),
    Pair("gemma2-9b", "drafts/gemma2-2b", 40),
    Pair("gemma3-27b", SMALL, 24),
    Pair("ministral-8b", SMALL, 40, document_tokens=(16_384, 98_304)),
    Pair("gpt-oss-20b", SMALL, 6),
    Pair("llama4-scout", SMALL, 24, document_tokens=(16_384, 98_304)),
    Pair("jamba-mini", SMALL, 6),
    Pair("qwen3-next", SMALL, 8),
    Pair("nemotron-h-8b", SMALL, 8),
)


def reasoning(pair: Pair, count: int = REASONING_REQUESTS) -> list[TraceRow]:
    """Unrelated documents, evenly on a logarithmic scale, and long answers; the same each time."""
    draw = np.random.default_rng(0)
    low, high = np.log(pair.document_tokens)
    prompts = np.exp(draw.uniform(low, high, count)).astype(np.int64)
    outputs = draw.integers(*ANSWER_TOKENS, count, endpoint=True)
    return unrelated(np.zeros(count), prompts, outputs)


def replayed(
    pair: Pair, manager: Manager, rows: Sequence[TraceRow], *, draft_tokens: bool = True
) -> dict[str, Any]:
    """Figures of one run; all requests wait at the start."""
    session = Session(cache_dir=Path("unused"))
    models = read_models(pair.model, pair.draft if draft_tokens else None, ELEMENT_BYTES, session)
    layout = plan_layout(models.layers, pair.memory_gib * GIB, manager=manager)
    limits = replay_limits(layout, models.max_model_len)
    run = Replay(
        create_core(layout),
        models.layers,
        DraftTokens(DRAFTED_TOKENS if draft_tokens else 0, pair.draft).within(limits, models),
        rows,
        "start",
        Machine(load_profile(HARDWARE), models.cost, models.draft_cost),
        MonotonicClock(),
        acceptance=Acceptance(ACCEPTANCE),
    )
    run.run()
    report = run.report()
    without_draft_tokens = report["output_tokens"] - report["spec_decode_accepted_tokens"]
    figures = {name: report[name] for name in FIGURES}
    return figures | {"tokens_per_target_step": report["output_tokens"] / without_draft_tokens}


def measure(traces: Path | None, pairs: Sequence[Pair] = PAIRS) -> list[dict[str, Any]]:
    """Run every pair under every manager; on the drawn workload also without draft tokens."""
    results = []
    for pair in pairs:
        rows = reasoning(pair)
        runs = _by_manager(pair, rows)
        runs["kvell without guesses"] = replayed(pair, "kvell", rows, draft_tokens=False)
        results.append({"workload": REASONING, "pair": vars(pair), "runs": runs})
        if traces is not None:
            rows = read_trace(traces / f"{AZURE}.jsonl.gz", AZURE_REQUESTS)
            runs = _by_manager(pair, rows)
            results.append({"workload": AZURE, "pair": vars(pair), "runs": runs})
    return results


def _by_manager(pair: Pair, rows: Sequence[TraceRow]) -> dict[str, dict[str, Any]]:
    return {manager: replayed(pair, manager, rows) for manager in MANAGERS}


def ratio(result: dict[str, Any], manager: str, figure: str = "output_tokens_per_second") -> float:
    """Ours over another manager's."""
    runs = result["runs"]
    return float(runs["kvell"][figure] / runs[manager][figure])


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of ratios, ours over ``manual`` and ``max-page``, by workload."""
    return {
        workload: _means([r for r in results if r["workload"] == workload])
        for workload in dict.fromkeys(r["workload"] for r in results)
    } | {"paper_mixed_throughput_over_manual": PAPER_MEAN}


def _means(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mixed = [r for r in results if r["pair"]["is_mixed"]]
    plain = [r for r in results if not r["pair"]["is_mixed"]]
    return {
        f"{kind}_{name}_over_{manager}": statistics.mean(ratio(r, manager, figure) for r in chosen)
        for kind, chosen in (("mixed", mixed), ("plain", plain))
        for manager in ("manual", "max-page")
        for name, figure in (("throughput", "output_tokens_per_second"), ("batch", "batch_mean"))
        if chosen
    }


def missed(results: Sequence[dict[str, Any]]) -> list[str]:
    """Bounds that were not kept: equal to ``manual`` within 1 % on plain pairs, else better.

    On traces whose requests are shorter than the windows, mixed pairs act like plain ones: there
    ours must not be worse.
    """
    lines = []
    for result in results:
        pair, over = result["pair"], ratio(result, "manual")
        kept = abs(over - 1) <= SAME
        if pair["is_mixed"]:
            kept = over > 1 if result["workload"] == REASONING else over >= 1 - SAME
        if not kept:
            where = f"{result['workload']}: {pair['model']} with {pair['draft']}"
            lines.append(f"{where}: {over:.3f} of manual")
    return lines


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each pair and manager."""
    table = Table(title=f"{DRAFTED_TOKENS} guesses, acceptance {ACCEPTANCE}, {HARDWARE}")
    names = ("batch", "waste %", "tokens/s", "finished", "refused", "preempted")
    left = ("workload", "model", "draft", "manager")
    for name in (*left[:3], "GiB", "manager", *names):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in left)
    for result in results:
        pair = result["pair"]
        for manager, run in result["runs"].items():
            table.add_row(
                result["workload"],
                pair["model"],
                pair["draft"],
                str(pair["memory_gib"]),
                manager,
                f"{run['batch_mean']:.1f}",
                f"{100 * run['waste']:.1f}",
                f"{run['output_tokens_per_second']:.1f}",
                *(str(run[f"requests_{name}"]) for name in ("finished", "refused")),
                str(run["preemptions"]),
            )
    return table
