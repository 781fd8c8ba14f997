"""The report of ``kvell plan`` for people: sentences and tables."""

from typing import TYPE_CHECKING

from kvell.byte_sizes import format_bytes
from kvell.cli.plan.report import GB, DeviceFit, PlanReport
from kvell.cli.terminal.tables import made_table
from kvell.engine.requests.limits import Limits
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.groups.capacity import pool_bytes_for
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from rich.table import Table

RULES = {
    "lcm": "the least common multiple of all pages",
    "padded": "the smallest size that pads no page by more than 1 %",
    "largest-page": "the largest page: all that pads less is above 1/64 of the pool",
    "max-page": "every page is as large as the largest",
}
"""Descriptions of the sizing rules of :mod:`kvell.pages.sizing`."""

ONE_GPU = (
    "a model must fit one GPU: there is no tensor parallelism, and each instance has its own GPU"
)


def summary_lines(report: PlanReport) -> list[str]:
    """Return the plan in sentences."""
    layout = report.layout
    models = (report, *report.beside)
    named = ", ".join(f"{model.model} ({model.architecture})" for model in models)
    return [
        f"{named}, manager {report.manager}: "
        f"{format_bytes(layout.pool_bytes)} of KV memory = {layout.num_large_pages:,} large pages "
        f"of {format_bytes(layout.large_page_bytes)}",
        f"sizing rule {layout.sizing_rule}: {RULES[layout.sizing_rule]}",
        *(
            (f"{model.model}: " if report.beside else "") + line
            for model in models
            for line in _model_lines(model)
        ),
        *_state_lines(layout),
        *_image_lines(layout),
    ]


def _model_lines(report: PlanReport) -> list[str]:
    """Return the lines of one model, not of the pool."""
    lines = [
        f"longest request: {report.longest_request_tokens:,} tokens "
        f"(the model was made for {report.max_model_len:,})",
    ]
    if report.longest_request_tokens < report.max_model_len:
        chunk_tokens = Limits().min_chunk_tokens
        needed_bytes = pool_bytes_for(report.own_layout, report.max_model_len, chunk_tokens)
        lines.append(
            f"one request of {report.max_model_len:,} tokens needs "
            f"--kv-memory {-(-needed_bytes // MIB)}MiB"
        )
    if report.reach_tokens:
        reached = (f"{tokens:,} on {count}" for count, tokens in report.reach_tokens.items())
        lines.append(f"on instances that lend each other memory: {', '.join(reached)}")
    if report.taken.weights_bytes is not None:
        lines.append(
            f"on a GPU, in addition to KV memory: {format_bytes(report.taken.weights_bytes)} of "
            f"weights, {format_bytes(report.taken.step_bytes)} for a step"
        )
    if report.refusal:
        lines.append(f"generate and serve refuse it: {report.refusal}")
    return lines


def _state_lines(layout: Layout) -> list[str]:
    return [
        f"every request holds one {group.name} of {format_bytes(group.token_bytes)} "
        f"in {group.slices:,} page{'s' * (group.slices > 1)}, and every checkpoint one more"
        for group in layout.groups
        if group.kind is GroupKind.STATE
    ]


def _image_lines(layout: Layout) -> list[str]:
    return [
        f"requests below are of text alone; a token of an image takes "
        f"{format_bytes(group.token_bytes)} more ({group.name})"
        for group in layout.groups
        if group.kind in (GroupKind.CROSS, GroupKind.VISION)
    ]


def _page_content(group: GroupSpec) -> str:
    if group.kind is GroupKind.STATE:
        return f"state of {group.layers_per_page or len(group.layers)}"
    if group.kind.counts_tokens:
        return f"{group.page_tokens} tokens"
    return f"{group.page_tokens} of an image"


def group_table(report: PlanReport) -> "Table":
    """Return a table with a row per layer group."""
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
    return made_table("Layer groups", headers, rows)


def fit_table(report: PlanReport) -> "Table":
    """Return a table with a row per request length."""
    headers = ("a request of", "holds", "fit together")
    rows = [
        (f"{fit.request_tokens:,} tokens", format_bytes(fit.request_bytes), f"{fit.requests:,}")
        for fit in report.fits
    ]
    title = f" to {report.model}" if any(g.model for g in report.layout.groups) else ""
    return made_table(f"Requests{title}, while decoding", headers, rows)


def device_table(report: PlanReport) -> "Table":
    lengths = (f"{tokens:,}" for tokens in report.lengths_tokens)
    headers = ("GPU", "KV memory", "longest", *lengths)
    rows = [_device_row(device) for device in report.devices]
    return made_table("Requests that fit together on a GPU, by their tokens", headers, rows)


def _device_row(device: DeviceFit) -> tuple[str, ...]:
    size = device.memory_bytes
    name = format_bytes(size) if size % GB else f"{size // GB} GB"
    if not device.kv_memory_bytes:
        return (name, "none left", *("-" for _ in (None, *device.requests)))
    return (
        name,
        format_bytes(device.kv_memory_bytes),
        f"{device.longest_request_tokens:,}",
        *(f"{count:,}" for count in device.requests),
    )
