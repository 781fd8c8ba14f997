"""What ``kvell plan`` says, as data and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvell.cli.sizes import format_bytes
from kvell.engine.limits import Limits
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.capacity import longest_request, pool_bytes_for, request_bytes, requests_that_fit
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS_TOKENS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)


@dataclass(frozen=True)
class Fit:
    """How many requests of one length decode at once."""

    request_tokens: int
    request_bytes: int
    requests: int


@dataclass(frozen=True)
class PlanReport:
    """A layout, and what fits into it."""

    model: str
    architecture: str
    manager: str
    layout: Layout
    max_model_len: int
    longest_request_tokens: int
    fits: tuple[Fit, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report for machines; sizes in bytes, lengths in tokens."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "manager": self.manager,
            "pool_bytes": self.layout.pool_bytes,
            "large_page_bytes": self.layout.large_page_bytes,
            "num_large_pages": self.layout.num_large_pages,
            "sizing_rule": self.layout.sizing_rule,
            "groups": [_group_dict(group) for group in self.layout.groups],
            "max_model_len": self.max_model_len,
            "longest_request_tokens": self.longest_request_tokens,
            "requests_that_fit": [asdict(fit) for fit in self.fits],
        }


def make_report(
    model: str,
    architecture: str,
    manager: str,
    layout: Layout,
    max_model_len: int,
    lengths_tokens: tuple[int, ...] = LENGTHS_TOKENS,
) -> PlanReport:
    """Work out what fits for each length that the model can serve, and for its longest."""
    lengths = sorted({min(length, max_model_len) for length in (*lengths_tokens, max_model_len)})
    fits = tuple(
        Fit(tokens, request_bytes(layout, tokens), requests_that_fit(layout, tokens))
        for tokens in lengths
    )
    longest = longest_request(layout, max_model_len, Limits().min_chunk_tokens)
    return PlanReport(model, architecture, manager, layout, max_model_len, longest, fits)


def _group_dict(group: GroupSpec) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": str(group.kind),
        "layers": list(group.layers),
        "window_tokens": group.window_tokens,
        "token_bytes": group.token_bytes,
        "page_tokens": group.page_tokens,
        "layers_per_page": group.layers_per_page or len(group.layers),
        "pages_per_state": group.slices if group.kind is GroupKind.STATE else 0,
        "page_bytes": group.page_bytes,
        "padding_bytes": group.padding_bytes,
        "pages_per_large_page": group.pages_per_large,
        "model": group.model,
        "required_for_hit": group.required_for_hit,
        "counts_images": group.counts_images,
        "holds_embeddings": group.holds_embeddings,
    }


def summary_lines(report: PlanReport) -> list[str]:
    """The plan in sentences."""
    layout = report.layout
    lines = [
        f"{report.model} ({report.architecture}), manager {report.manager}: "
        f"{format_bytes(layout.pool_bytes)} of KV memory = {layout.num_large_pages:,} large pages "
        f"of {format_bytes(layout.large_page_bytes)}",
        f"longest request: {report.longest_request_tokens:,} tokens "
        f"(the model was made for {report.max_model_len:,})",
    ]
    if report.longest_request_tokens < report.max_model_len:
        needed_mib = -(
            -pool_bytes_for(layout, report.max_model_len, Limits().min_chunk_tokens) // MIB
        )
        lines.append(
            f"one request of {report.max_model_len:,} tokens needs --kv-memory {needed_mib}MiB"
        )
    return [*lines, *_state_lines(layout)]


def _state_lines(layout: Layout) -> list[str]:
    """What a request takes whatever its length."""
    return [
        f"every request holds one {group.name} of {format_bytes(group.token_bytes)} "
        f"in {group.slices:,} page{'s' * (group.slices > 1)}, and every checkpoint one more"
        for group in layout.groups
        if group.kind is GroupKind.STATE
    ]


def _page_content(group: GroupSpec) -> str:
    if group.kind is GroupKind.STATE:
        return f"state of {group.layers_per_page or len(group.layers)}"
    if group.kind.counts_tokens:
        return f"{group.page_tokens} tokens"
    return f"{group.page_tokens} of an image"


def group_table(report: PlanReport) -> "Table":
    """A row per layer group."""
    headers = (
        "group",
        "layers",
        "a token or state",
        "page",
        "page size",
        "padding",
        "per large page",
    )
    rows = [
        (
            group.name,
            str(len(group.layers)),
            format_bytes(group.token_bytes),
            _page_content(group),
            format_bytes(group.page_stride_bytes),
            f"{100 * group.padding_bytes / group.page_stride_bytes:.2f} %",
            f"{group.pages_per_large:,}",
        )
        for group in report.layout.groups
    ]
    return _table("Layer groups", headers, rows)


def fit_table(report: PlanReport) -> "Table":
    """A row per request length."""
    headers = ("a request of", "holds", "fit at once")
    rows = [
        (f"{fit.request_tokens:,} tokens", format_bytes(fit.request_bytes), f"{fit.requests:,}")
        for fit in report.fits
    ]
    return _table("Requests, while decoding", headers, rows)


def _table(title: str, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
