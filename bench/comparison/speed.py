"""Sections on tokens per second: servers and libraries, with the machine's limits."""

import statistics
from typing import Any

from bench.comparison.section import Bars, Section, number, percent
from bench.load.verdicts import COLUMNS as VERDICTS

SIDE_BY_SIDE = "python -m bench.side_by_side --json bench/results/zen5/side_by_side.json"
MORE_MODELS = (
    "python -m bench.side_by_side --vllm-env DIR --rounds 3 --models smollm2-int4 gemma-3-270m "
    "falcon-h1-small --json bench/results/zen5/side_by_side_models.json"
)
SYSTEM_COLUMNS = (
    *("system", "tokens/s", "spread", "Kvell is", "of limit", "decode of limit"),
    *("TTFT ms", "TPOT ms"),
)
NAMES = {
    "kvell": "Kvell",
    "vllm": "vLLM CPU 0.32",
    "transformers": "transformers",
    "generate-batch": "transformers, continuous batching",
    "continuous batching": "transformers, continuous batching",
    "kvell-offline": "Kvell, library",
}


def side_by_side(found: dict[str, Any]) -> Section:
    """Systems that took turns in one run."""
    scenarios, roofline = found["scenarios"], found["roofline"]
    names = list(dict.fromkeys(name for one in scenarios for name in one["systems"]))
    rows = [
        (one["scenario"], _shown(name), *_cells(one, one["systems"][name]))
        for one in scenarios
        for name in one["systems"]
    ]
    note = (
        f"{found['model']}, bfloat16, {found['machine']['threads']} cores, {found['rounds']} "
        "rounds in "
        f"turn. In the same run the machine read {roofline['read_bytes_per_second'] / 1e9:.1f} "
        "GB/s and "
        f"multiplied {roofline['gemm_flops_per_second'] / 1e9:,.0f} GFLOP/s. Servers answer over "
        "HTTP. "
        "Tokens/s are prompt tokens of a prefill, output tokens of all else, prefill included; "
        "*spread* is (largest − smallest) / median of a system's own rounds; *Kvell is* the median "
        "of the rounds' own ratios; *of limit* the part of what reading weights and KV (decode) or "
        "multiplying (prefill) alone would allow, *decode of limit* the same of the tokens "
        "behind the first, by the median time per token."
    )
    bars = [
        _bars("decode", "output", scenarios, names),
        _bars("prefill", "prompt", scenarios, names),
    ]
    return Section(
        "Tokens per second: servers side by side",
        note,
        "zen5/side_by_side.json",
        SIDE_BY_SIDE,
        ("scenario", *SYSTEM_COLUMNS),
        rows,
        [one for one in bars if one.groups],
    )


def more_models(found: dict[str, Any]) -> Section:
    """The same of other models and weights, each in a run of its own."""
    models = found["models"]
    rows = [
        (f"{model['model']}, {one['scenario']}", _shown(name), *_cells(one, one["systems"][name]))
        for model in models
        for one in model["scenarios"]
        for name in one["systems"]
    ]
    refusals = [
        f"{_shown(name)} has no row of {model['model']}: {_sentence(why)}"
        for model in models
        for name, why in model["refused"].items()
    ]
    return Section(
        "The same of other models",
        " ".join(["Columns as above; small shapes have random weights.", *refusals]),
        "zen5/side_by_side_models.json",
        MORE_MODELS,
        ("model, scenario", *SYSTEM_COLUMNS),
        rows,
    )


def _sentence(why: str) -> str:
    return why if why.endswith(".") else f"{why}."


def libraries(found: dict[str, Any]) -> Section:
    """Kvell as a library beside transformers."""
    rates: dict[str, dict[str, list[float]]] = found["tokens_per_second"]
    names = list(next(iter(rates.values())))
    rows = [
        (
            batch,
            *(number(statistics.median(of[name])) for name in names),
            f"{found['ratio'][batch]:.2f}×",
        )
        for batch, of in rates.items()
    ]
    series = {_shown(n): [statistics.median(of[n]) for of in rates.values()] for n in names}
    groups = [f"batch {batch}" for batch in rates]
    return Section(
        "Tokens per second: libraries",
        "SmolLM2, bfloat16, 128 tokens in and 128 out, prefill included; medians; the last column "
        "is "
        "Kvell over `generate`. Read bandwidth "
        f"{found['machine']['read_bandwidth_gb_per_second']} GB/s "
        "in the same run.",
        "zen5/engine_throughput.json",
        "python -m bench.engine.throughput --json bench/results/zen5/engine_throughput.json",
        ("batch", *(_shown(name) for name in names), "ratio"),
        rows,
        [Bars("libraries", "SmolLM2, libraries", "output tokens/s", groups, series)],
    )


def load_tools(found: dict[str, Any]) -> Section:
    """Whether load tools agree."""
    rows = [
        (
            f"{server}, {of['rounds']} runs",
            one["tool"],
            one["figure"].removesuffix("_seconds"),
            one["against"],
            number(one["found"] * 1000),
            number(one["reference"] * 1000),
            percent(one["difference"]),
            percent(one["allowed"]),
            "agrees" if one["agrees"] else "**differs**",
        )
        for server, of in found["servers"].items()
        for one in of["verdicts"]
    ]
    return Section(
        "Does the load generator measure what others measure?",
        "`kvell bench serve` beside tools that others wrote, in turn; medians of their runs' "
        "means. "
        "Allowed are 3 % where a server's times are known, else twice the larger repeat spread.",
        "zen5/load_agreement.json",
        "python -m bench.load.agreement --json bench/results/zen5/load_agreement.json",
        VERDICTS,
        rows,
    )


def _cells(one: dict[str, Any], system: dict[str, Any]) -> tuple[str, ...]:
    median = system["median"]
    ttft, tpot = (median.get(f"{name}_p50_seconds") for name in ("ttft", "tpot"))
    return (
        number(median[one["figure"]]),
        percent(system["spread"], 0),
        f"{system['ratio']:.2f}×",
        percent(system["share_of_limit"], 0),
        percent(system["decode_share_of_limit"], 0),
        number(None if ttft is None else ttft * 1000),
        number(None if tpot is None else tpot * 1000),
    )


def _bars(kind: str, unit: str, scenarios: list[dict[str, Any]], names: list[str]) -> Bars:
    chosen = [one for one in scenarios if one["figure"] == f"{unit}_tokens_per_second"]
    series: dict[str, Any] = {
        _shown(name): [_median(one, name) for one in chosen] for name in names
    }
    if chosen and all(one["limit"] is not None for one in chosen):
        series["limit of the machine"] = [one["limit"] for one in chosen]
    groups = [one["scenario"] for one in chosen]
    return Bars(f"side_by_side_{kind}", "SmolLM2, side by side", f"{unit} tokens/s", groups, series)


def _median(one: dict[str, Any], name: str) -> float | None:
    system = one["systems"].get(name)
    return None if system is None else system["median"][one["figure"]]


def _shown(name: str) -> str:
    return NAMES.get(name, name)
