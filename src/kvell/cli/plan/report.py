"""The report of ``kvell plan`` as data."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvell.byte_sizes import format_bytes
from kvell.cli.terminal.tables import made_table
from kvell.cluster.steering.placements import longest_with
from kvell.engine.lending.distributed_request import local_reason, section_bytes
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.groups.capacity import (
    longest_request,
    pool_bytes_for,
    request_bytes,
    requests_that_fit,
)
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from rich.table import Table

    from kvell.models.config.description import ModelDescription

GB = 10**9
DEVICES_BYTES = (24 * GB, 80 * GB, 141 * GB)
"""The memory of common GPUs, as vendors count it, for plans without ``--gpu-memory``."""


@dataclass(frozen=True)
class DeviceFit:
    """The KV memory and requests that fit on one GPU.

    :param kv_memory_bytes: pool that ``generate`` and ``serve`` would allocate: a share of the
        memory after weights and a step; 0 if it is less than a page per group.
    :param requests: number of requests that decode together, for each length in the report.
    """

    memory_bytes: int
    kv_memory_bytes: int
    large_page_bytes: int
    sizing_rule: str
    longest_request_tokens: int
    requests: tuple[int, ...]


def device_fit(
    memory_bytes: int,
    taken_bytes: int,
    kv_share: float,
    layout_of: Callable[[int], Layout],
    lengths_tokens: Sequence[int],
) -> DeviceFit:
    """Compute the requests that fit on a GPU.

    :param layout_of: returns the model's layout over a pool of a given number of bytes.
    :param lengths_tokens: lengths of requests, ascending; the last is the model's longest.
    """
    pool_bytes = int((memory_bytes - taken_bytes) * kv_share)
    try:
        layout = layout_of(pool_bytes) if pool_bytes > 0 else None
    except ChangeSomething:  # less than a page for every group
        layout = None
    if layout is None:
        return DeviceFit(memory_bytes, 0, 0, "", 0, tuple(0 for _ in lengths_tokens))
    return DeviceFit(
        memory_bytes,
        layout.pool_bytes,
        layout.large_page_bytes,
        layout.sizing_rule,
        longest_request(layout, lengths_tokens[-1], Limits().min_chunk_tokens),
        tuple(requests_that_fit(layout, tokens) for tokens in lengths_tokens),
    )


INSTANCES = (2, 4, 8)
LENGTHS_TOKENS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)


@dataclass(frozen=True)
class Fit:
    """The number of requests of one length that decode together."""

    request_tokens: int
    request_bytes: int
    requests: int


@dataclass(frozen=True)
class Taken:
    """Memory of a GPU that is not KV memory.

    :param weights_bytes: None if unknown.
    """

    weights_bytes: int | None = None
    step_bytes: int = 0


@dataclass(frozen=True)
class PlanReport:
    """A layout, and the requests that fit into it.

    :param refusal: reason why the model cannot be served yet; "" if it can.
    :param stored_as: the quantisation of its files, and the form in memory; "" for plain ones.
    :param devices: fits on common GPUs; empty if the weights' size is unknown.
    :param beside: reports of further models in the same pool; each counts the requests that fit
        while the other models have none.
    """

    model: str
    architecture: str
    manager: str
    layout: Layout
    max_model_len: int
    longest_request_tokens: int
    fits: tuple[Fit, ...]
    refusal: str = ""
    taken: Taken = Taken()
    devices: tuple[DeviceFit, ...] = ()
    beside: tuple["PlanReport", ...] = ()
    stored_as: str = ""

    @property
    def reach_tokens(self) -> dict[int, int]:
        """The longest request by the number of instances of one host that lend each other memory.

        It is empty if one instance is enough for any request, or if loans are not possible.
        """
        groups = self.layout.groups
        alone_tokens = self.longest_request_tokens
        if alone_tokens >= self.max_model_len or local_reason(self.name_in_pool, groups):
            return {}
        pool_bytes = self.layout.pool_bytes
        facts = InstanceFacts(
            0,
            0,
            self.model,
            alone_tokens,
            pool_bytes,
            section_bytes=section_bytes(groups),
            reach_tokens=self.max_model_len,
        )
        return {
            count: longest_with(facts, facts.lengths(), [pool_bytes] * (count - 1))
            for count in INSTANCES
        }

    @property
    def name_in_pool(self) -> str:
        """The model's name in the layout's groups; "" if it is the only one."""
        return self.model if any(group.model for group in self.layout.groups) else ""

    @property
    def lengths_tokens(self) -> tuple[int, ...]:
        """The request lengths in the report, ascending; the last is the model's longest."""
        return tuple(fit.request_tokens for fit in self.fits)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; sizes in bytes, lengths in tokens."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "manager": self.manager,
            "pool_bytes": self.layout.pool_bytes,
            "large_page_bytes": self.layout.large_page_bytes,
            "num_large_pages": self.layout.num_large_pages,
            "sizing_rule": self.layout.sizing_rule,
            "groups": [_group_dict(group) for group in self.layout.groups],
            **self._own_dict(),
            "devices": [_device_dict(device, self.lengths_tokens) for device in self.devices],
            "beside": [
                {"model": report.model, "architecture": report.architecture, **report._own_dict()}
                for report in self.beside
            ],
        }

    def _own_dict(self) -> dict[str, Any]:
        return {
            "max_model_len": self.max_model_len,
            "longest_request_tokens": self.longest_request_tokens,
            "reach_tokens": self.reach_tokens,
            "requests_that_fit": [asdict(fit) for fit in self.fits],
            "refusal": self.refusal,
            "stored_as": self.stored_as,
            **asdict(self.taken),
        }


def make_report(
    model: str, description: "ModelDescription", manager: str, layout: Layout, name: str = ""
) -> PlanReport:
    """Compute the fits for each length that the model can serve, and for its longest.

    :param name: name of the model's groups in the layout, if there are several models.
    """
    architecture, max_model_len = description.architecture, description.max_model_len
    own = layout.held_by(name) if name else layout
    fits = tuple(
        Fit(tokens, request_bytes(own, tokens), requests_that_fit(own, tokens))
        for tokens in sorted({min(n, max_model_len) for n in (*LENGTHS_TOKENS, max_model_len)})
    )
    longest = longest_request(own, max_model_len, Limits().min_chunk_tokens)
    return PlanReport(model, architecture, manager, layout, max_model_len, longest, fits)


def _device_dict(device: DeviceFit, lengths_tokens: tuple[int, ...]) -> dict[str, Any]:
    fits = zip(lengths_tokens, device.requests, strict=True)
    named = [{"request_tokens": tokens, "requests": count} for tokens, count in fits]
    return {**asdict(device), "requests": named}


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
    lines = [
        f"longest request: {report.longest_request_tokens:,} tokens "
        f"(the model was made for {report.max_model_len:,})",
    ]
    if report.longest_request_tokens < report.max_model_len:
        chunk_tokens = Limits().min_chunk_tokens
        name = report.name_in_pool
        own = report.layout.held_by(name) if name else report.layout
        needed_bytes = pool_bytes_for(own, report.max_model_len, chunk_tokens)
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
    if report.stored_as:
        lines.append(f"weights are stored as {report.stored_as}")
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
    headers = ("a request of", "holds", "fit together")
    rows = [
        (f"{fit.request_tokens:,} tokens", format_bytes(fit.request_bytes), f"{fit.requests:,}")
        for fit in report.fits
    ]
    title = f" to {report.model}" if report.name_in_pool else ""
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
