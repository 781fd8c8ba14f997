"""Tables of the figures of benches."""

import io
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from typing_extensions import override

from kvell.cli.terminal.environment import given_columns
from kvell.cli.terminal.tables import UNBOUNDED_COLUMNS, made_table

if TYPE_CHECKING:
    from rich.console import Console

BLANKS = re.compile(r" +$", re.MULTILINE)
LATENCIES = {
    "ttft_seconds": "to the first token",
    "tpot_seconds": "per output token",
    "e2e_seconds": "end to end",
    "inter_token_seconds": "between tokens",
    "send_lag_seconds": "sent late by the generator",
}
OF_THE_SERVER = {
    "ttft_seconds": "to the first token (server)",
    "tpot_seconds": "per output token (server)",
    "e2e_seconds": "end to end (server)",
    "inter_token_seconds": "between tokens (server)",
    "queue_seconds": "  in its queue",
    "prefill_seconds": "  prefill",
    "decode_seconds": "  decode",
}
"""The server's own figures; percentiles are interpolated in the buckets of its histograms."""
SPREAD = ("mean", "p50", "p90", "p99")


class TrimmedLines(io.TextIOBase):
    """A text stream that writes to another one, without blanks at the ends of lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute of the base class
        return self._stream.encoding

    @override
    def write(self, text: str) -> int:
        self._stream.write(BLANKS.sub("", text))
        return len(text)

    @override
    def flush(self) -> None:
        self._stream.flush()


def wide_console() -> "Console":
    """Return a console on stdout.

    Without a terminal it is as wide as ``COLUMNS`` says, or has room for any table.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    file = cast(TextIO, TrimmedLines(sys.stdout))
    return Console(highlight=False, file=file, width=given_columns() or UNBOUNDED_COLUMNS)


def print_load(title: str, report: Mapping[str, Any]) -> None:
    console = wide_console()
    rows = [
        (name, *(_milliseconds(report[key][part]) for part in SPREAD))
        for key, name in LATENCIES.items()
    ]
    rows += [
        (name, *(_milliseconds(report["server"][key][part]) for part in SPREAD))
        for key, name in OF_THE_SERVER.items()
        if key in report["server"]
    ]
    console.print(made_table(title, ("milliseconds", *SPREAD), rows))
    console.print(made_table("", ("figure", "value"), _counts(report)))


def _counts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("completed", f"{report['completed']:,}"),
        ("failed", f"{report['failed']:,}"),
        *((f"  {reason}", f"{count:,}") for reason, count in report["failures"].items()),
        ("hung up", f"{report['disconnected']:,}"),
        ("most open requests", f"{report['open_requests_max']:,}"),
        ("seconds", f"{report['duration_seconds']:,.1f}"),
        ("requests/s", f"{report['request_rate']:,.2f}"),
        (_goodput_name(report), f"{report['goodput']:,.2f}"),
        ("  of all requests", f"{report['slo_attainment']:.1%}"),
        ("prompt tokens", f"{report['prompt_tokens']:,}"),
        ("output tokens", f"{report['output_tokens']:,}"),
        ("output tokens/s", f"{report['output_tokens_per_second']:,.1f}"),
    ]
    if report["cached_share"] is not None:
        rows.append(("prompt tokens from the cache", f"{report['cached_share']:.1%}"))
    server = report["server"]
    if "prefix_cache_hit_rate" in server:
        rows.append(("prefix cache hits (server)", f"{server['prefix_cache_hit_rate']:.1%}"))
    if "preemptions" in server:
        rows.append(("preemptions (server)", f"{server['preemptions']:,}"))
    if "draft_acceptance_rate" in server:
        rows.append(("draft tokens accepted (server)", f"{server['draft_acceptance_rate']:.1%}"))
    if "tokens_per_step" in server:
        rows.append(("tokens per step (server)", f"{server['tokens_per_step']:,.1f}"))
    for key in ("prompt_tokens", "output_tokens"):
        if key in server:
            rows.append((f"{key.replace('_', ' ')} (server)", f"{server[key]:,}"))
    return rows


def _goodput_name(report: Mapping[str, Any]) -> str:
    objectives = [
        f"{name} ≤ {report[key]:g} s"
        for name, key in (("TTFT", "slo_ttft_seconds"), ("TPOT", "slo_tpot_seconds"))
        if report[key] is not None
    ]
    return f"goodput, requests/s ({', '.join(objectives) or 'no objective given'})"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:,.1f}"
