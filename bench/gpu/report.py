"""Rows: checks and figures that may fail, a line for each, and the table of all."""

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
"""One result: a check with ``ok`` and ``said``, or figures with their ``kind``."""
GOAL = 0.8
"""Part of the memory bandwidth that decode at batch 8 and 2K tokens must reach."""
PLAIN_HEADS = "llama 32/8 x 128"
"""The shape that the goal is for."""


def check(name: str, run: Callable[[], str]) -> Row:
    """Return the row of a check; ``run`` says how well it holds, or raises.

    One that fails must not hide the others, nor must one of the figures.
    """
    try:
        return {"check": name, "ok": True, "said": run()}
    except Exception as error:
        return {"check": name, "ok": False, "said": _said(error)}


def figures(name: str, run: Callable[[], Row]) -> Row:
    """Return the figures that ``run`` takes, or a row of why it could not."""
    try:
        return run()
    except Exception as error:
        return {"figures": name, "ok": False, "said": _said(error)}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def line(row: Row, read: float | None) -> str:
    """Return a row as text.

    :param read: bytes per second that the memory reads in the same run.
    """
    marked = "pretended  " if row.get("pretended") else ""
    return f"{row['stage']:9} {marked}{_text(row, read)}"


def _text(row: Row, read: float | None) -> str:
    if "ended" in row:
        verdict = "ok" if row["ok"] else "FAILED"
        return f"{verdict}: {row['rows']} rows in {row['seconds']:.1f} s"
    if "kind" in row:
        return _figures(row, read)
    name = row.get("check") or row.get("figures") or "the stage"
    return f"{'ok' if row['ok'] else 'FAILED'} {name}: {last_line(row['said'])}"


def last_line(said: str) -> str:
    """Return the last line of a text: of a traceback, the exception."""
    return (said.strip().splitlines() or [""])[-1]


def _figures(row: Row, read: float | None) -> str:
    kind = row["kind"]
    if kind == "machine":
        hidden = ("kind", "stage", "pretended")
        return "  ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)
    if kind == "memory":
        return f"memory: copy {row['copy'] / 1e9:.0f} GB/s, read {row['read'] / 1e9:.0f} GB/s"
    if kind == "product":
        size, rate = row["size"], row["flops_per_second"]
        return f"product of {size} x {size} matrices: {rate / 1e12:.0f} TFLOP/s"
    if kind == "host":
        return f"{row['microseconds']:8.1f} us of host: {row['call']}"
    if kind == "warm":
        return f"compiled {row['heads']} in {row['seconds']:.1f} s"
    if kind == "chunks":
        return _chunks(row)
    if kind == "engine":
        way = "ahead" if row.get("ahead") else "recorded" if row.get("records") else "computed"
        return (
            f"llama of 8 layers, {way}, {row['requests']} x {row['prompt']}:"
            f" prefill {row['prefill_tokens_per_second']:.0f} tokens/s,"
            f" decode {row['decode_tokens_per_second']:.0f} tokens/s,"
            f" {row['decode_step_seconds'] * 1e3:.1f} ms a step"
        )
    return _kernel(row, read)


def _chunks(row: Row) -> str:
    said = f"{row['call']:8} {row['chunks']:4} chunks: {row['microseconds']:8.1f} us each"
    if "busy" not in row:
        return said
    said += f", unmap {row['unmap_microseconds']:.1f} us"
    said += ", apart" if row["apart"] else ""
    beside = "beside a kernel" if all(row["ran_beside"]) else "waited for a kernel"
    return said + (f", {beside}" if row["busy"] else "")


def _kernel(row: Row, read: float | None) -> str:
    kind = row["kind"]
    if kind == "copy":
        return f"copy     pages of {row['page_bytes']}: {row['bytes_per_second'] / 1e9:.0f} GB/s"
    if kind == "decode":
        share = f"{row['bytes_per_second'] / read:4.0%} of read" if read else "read unknown"
        return (
            f"decode   {row['heads']:20} {row['requests']:3} x {row['context']:6}"
            f" {row['microseconds']:8.1f} us {row['bytes_per_second'] / 1e9:6.0f} GB/s"
            f" = {share}  ({row['microseconds_with_launches']:.0f} us with launches)"
        )
    peers = "  ".join(
        f"{name} {value / 1e12:.0f}"
        for name, value in row.items()
        if name.startswith(("sdpa", "flash_"))
    )
    new = row.get("new", row["context"])
    return (
        f"{kind:8} {row['heads']:20} {row['requests']:3} x {row['context']:6}, {new} new:"
        f" {row['flops_per_second'] / 1e12:.0f} TFLOP/s  {peers}"
    ).rstrip()


def read_of(rows: Sequence[Row]) -> float | None:
    """Return the bytes per second that the memory reads, if it was measured."""
    return next((row["read"] for row in rows if row.get("kind") == "memory"), None)


def failures(rows: Sequence[Row]) -> list[Row]:
    """Return what failed: checks, processes that died, stages that were cut off or not run."""
    return [row for row in rows if not row.get("ok", True) and "ended" not in row]


def goal_line(rows: Sequence[Row]) -> str | None:
    """Say whether decode of the plain shape reaches :data:`GOAL` of the bandwidth, if measured."""
    read = read_of(rows)
    rates = [
        row["bytes_per_second"]
        for row in rows
        if row.get("kind") == "decode" and row["heads"] == PLAIN_HEADS and row["requests"] >= 8
    ]
    if not read or not rates or rows[-1].get("pretended"):
        return None
    return f"goal of {GOAL:.0%} on decode {'met' if min(rates) / read >= GOAL else 'missed'}"


def summary(rows: Sequence[Row]) -> str:
    """Return the table: figures, how each stage ended, and everything that failed."""
    read = read_of(rows)
    checks = [row for row in rows if "check" in row]
    good = sum(bool(row["ok"]) for row in checks)
    lines = [line(row, read) for row in rows if "kind" in row and row["kind"] != "warm"]
    lines += [line(row, read) for row in rows if "ended" in row]
    lines += [line(row, read) for row in failures(rows)]
    lines += [f"{good} of {len(checks)} checks hold"] if checks else []
    goal = goal_line(rows)
    return "\n".join([*lines, *([goal] if goal else [])]) + "\n"
