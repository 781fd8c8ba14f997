"""Sections on memory: batch, waste and hits, beside vLLM's manager and other managers."""

from collections.abc import Sequence
from typing import Any

from bench.comparison.section import Bars, Section, number, percent

TRACES = {"azure-2023-conv": "azure", "mooncake-conversation": "mooncake"}
US, ORDER = "manager_us_per_request_step", "decodes-first"


def peers_in_one_run(found: dict[str, Any]) -> Section:
    """vLLM's own manager classes on the same traces, both sides measured in one run."""
    rows, pairs = list[tuple[str, ...]](), list[tuple[str, dict[str, Any], dict[str, Any]]]()
    for one in found["rows"]:
        name = f"{one['shape']}, {TRACES.get(one['trace'], one['trace'])}"
        us_ours = min(run[US] for run in one["ours"])
        ours, theirs = one["ours"][0], one["theirs"][ORDER][0]
        us_theirs = min(run[US] for run in one["theirs"][ORDER])
        pairs.append((name, ours, theirs))
        rows.append(
            (
                name,
                f"{one['memory_gib']}",
                f"{number(ours['batch_mean'])} / {number(theirs['batch_mean'])}",
                f"{percent(ours['waste'])} / {percent(theirs['waste'])}",
                f"{percent(ours['hit_rate'])} / {percent(theirs['hit_rate'])}",
                f"{number(us_ours, 2)} / {number(us_theirs)}",
            )
        )
    missed = len(found["missed"])
    return Section(
        "Batch, waste and hits on real traces: Kvell / vLLM 0.32",
        "vLLM's own manager classes in its own environment, driven by the loop of `kvell replay`; "
        "both "
        "sides in one run, the best of the runs' CPU times. "
        f"Bounds that were not kept: {missed or 'none'}.",
        "zen5/managers_peers.json",
        "python -m bench.managers.peers --traces DIR --vllm-env DIR",
        ("shape, trace", "GiB", "batch", "waste", "hit rate", "µs per request-step"),
        rows,
        _peer_bars(pairs),
    )


def managers(found: dict[str, Any]) -> Section:
    """Clauses that must hold of our manager against all others, cell by cell."""
    rows = [
        (
            one["clause"],
            f"{one['compared']:,}",
            percent(one["part"]),
            percent(one["required"], 0),
            "yes" if one["holds"] else "**no**",
        )
        for one in found["verdicts"]
    ]
    return Section(
        "Every shape, trace and memory size under every manager",
        f"{found['cells']:,} cells in {found['comparisons']:,} comparisons. Where `managers.md` "
        "lies "
        "beside this page, it has the pictures.",
        "virtual/managers.json",
        "python -m bench.managers.matrix --traces DIR --vllm-env DIR",
        ("clause", "compared", "hold", "required", "holds"),
        rows,
    )


def batch_in_memory(found: dict[str, Any]) -> Section:
    """A real engine with a small pool."""
    results = found["results"]
    rows = [
        (
            manager,
            str(one["max_decoding"]),
            number(one["mean_decoding_while_waiting"]),
            str(one["steps"]),
            number(one["tokens_per_second"], 0),
        )
        for manager, one in results.items()
    ]
    return Section(
        "Requests that decode at once in 192 MiB",
        "Gemma-3-270M's shape, random weights, 24 requests of 3,000 tokens in and 128 out; "
        "`paged` is one "
        "page size for all layers, as engines without layer groups have it.",
        "zen5/batch_in_memory.json",
        "python -m bench.engine.batch_in_memory --json bench/results/zen5/batch_in_memory.json",
        ("manager", "most", "mean while some wait", "steps", "tokens/s"),
        rows,
        [
            Bars(
                "batch_in_memory",
                "Gemma-3-270M's shape in 192 MiB",
                "requests decoding",
                ["most", "mean while some wait"],
                {
                    manager: [one["max_decoding"], one["mean_decoding_while_waiting"]]
                    for manager, one in results.items()
                },
            )
        ],
    )


def packing(found: dict[str, Any]) -> Section:
    """Batch and waste of long requests."""
    rows = [
        (
            f"{ways['kvell']['memory_gib']}",
            name,
            number(way["batch"], 2),
            percent(way["waste"], 3),
            percent(way["waste_worst"], 3),
        )
        for ways in found["packing"]
        for name, way in ways.items()
    ]
    return Section(
        "Batch and waste of long requests on Ministral's shape",
        "20 requests of 55,000 to 110,000 tokens, mean of ten draws; *ideal* packs bytes, not "
        "pages.",
        "virtual/waste.json",
        "python -m bench.replay.waste --traces DIR",
        ("GiB", "manager", "batch", "waste", "worst draw"),
        rows,
    )


def hits(found: dict[str, Any]) -> Section:
    """Hits of the second request, and hits on traces as a part of the possible."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for one in found["traces"]:
        traces.setdefault(one["full"]["shape"], []).append(one)
    rows = []
    for shape, probe in found["probes"].items():
        parts = [one["full"]["hits_of_ideal"] for one in traces.get(shape, [])]
        ample = [one["ample"]["hits_of_ideal"] for one in traces.get(shape, [])]
        rows.append(
            (
                shape,
                f"{probe['shares_10000_of_20000_second']:,}",
                f"{probe['shares_10000_of_20000_third']:,}",
                f"{probe['shares_300_second']}",
                f"{probe['next_turn']:,} of {probe['previous_turn_tokens']:,}",
                percent(min(ample) if ample else None, 0),
                percent(min(parts) if parts else None, 0),
            )
        )
    return Section(
        "What a prefix cache hits",
        "Tokens that the second and the third request hit which share 10,000 of 20,000 tokens "
        "(and 300) with "
        "the first; what the next turn of a conversation hits; and the worst trace's hits as a "
        "part of what a "
        "cache that never forgets would hit, with ample and with a full pool.",
        "virtual/hits.json",
        "python -m bench.replay.hits --traces DIR",
        ("shape", "second", "third", "second of 300", "next turn", "ample", "full pool"),
        rows,
    )


def _peer_bars(pairs: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Bars]:
    """Name, our figures, theirs."""
    groups = [name for name, _, _ in pairs]
    batches = [ours["batch_mean"] / theirs["batch_mean"] for _, ours, theirs in pairs]
    waste = {
        "Kvell": [100 * ours["waste"] for _, ours, _ in pairs],
        "vLLM 0.32": [100 * theirs["waste"] for _, _, theirs in pairs],
    }
    return [
        Bars(
            "replay_batch",
            "mean batch on real traces",
            "× vLLM's batch",
            groups,
            {"Kvell": batches},
        ),
        Bars("replay_waste", "memory that nobody needs", "% of allocated bytes", groups, waste),
    ]
