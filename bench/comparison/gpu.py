"""The section on a GPU's kernels."""

from typing import Any

from bench.comparison.section import Bars, Section, number, percent


def gpu(found: dict[str, Any]) -> Section:
    """Kernels over pages, as a share of memory bandwidth or of other kernels' FLOP/s."""
    figures: list[dict[str, Any]] = [row for row in found["rows"] if "kind" in row]
    checks = [row for row in found["rows"] if "check" in row]
    machine, memory = (
        next(row for row in figures if row["kind"] == kind) for kind in ("machine", "memory")
    )
    decode = [one for one in figures if one["kind"] == "decode"]
    parts = [one["bytes_per_second"] / memory["read"] for one in decode]
    rows = [
        (
            f"decode, {one['heads']}",
            f"{one['requests']} × {one['context']:,}",
            f"{number(one['microseconds'])} µs",
            f"{percent(part, 0)} of read bandwidth",
        )
        for one, part in zip(decode, parts, strict=True)
    ]
    rows += [
        (
            f"prefill, {one['heads']}",
            f"{one['requests']} × {one['context']:,}",
            f"{number(one['flops_per_second'] / 1e12, 0)} TFLOP/s",
            f"{one['flops_per_second'] / one['sdpa_flash']:.2f}× torch's flash attention",
        )
        for one in figures
        if one["kind"] == "prefill" and one.get("sdpa_flash")
    ]
    good = sum(bool(check["ok"]) for check in checks)
    groups = [f"{one['heads']}, {one['requests']} × {one['context']:,}" for one in decode]
    return Section(
        f"Kernels on a GPU: {machine['gpu']}",
        f"{good} of {len(checks)} checks against reference results hold. The memory read "
        f"{memory['read'] / 1e12:.2f} TB/s in the same run.",
        "h200/gpu_check.json",
        "scripts/gpu_check --out bench/results/h200/gpu_check.json",
        ("kernel", "requests × context", "figure", "share"),
        rows,
        [
            Bars(
                "gpu_decode",
                "decode attention",
                "% of read bandwidth",
                groups,
                {"Kvell": [100 * p for p in parts]},
            )
        ],
    )
