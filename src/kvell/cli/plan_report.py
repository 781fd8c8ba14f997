"""What ``kvell plan`` says, as data."""

from dataclasses import asdict, dataclass
from typing import Any

from kvell.cli.plan_devices import DeviceFit
from kvell.engine.limits import Limits
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.prefix.capacity import longest_request, request_bytes, requests_that_fit

LENGTHS_TOKENS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)


@dataclass(frozen=True)
class Fit:
    """How many requests of one length decode at once."""

    request_tokens: int
    request_bytes: int
    requests: int


@dataclass(frozen=True)
class Taken:
    """What stands beside KV memory on a GPU.

    :param weights_bytes: None where nobody knows.
    :param step_bytes: activations of the largest step.
    """

    weights_bytes: int | None = None
    step_bytes: int = 0


@dataclass(frozen=True)
class PlanReport:
    """A layout, and what fits into it.

    :param refusal: why the model cannot be served yet; "" if it can.
    :param devices: what fits on common GPUs; none where the weights' size is not known.
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

    @property
    def lengths_tokens(self) -> tuple[int, ...]:
        """Lengths of requests that are stated, ascending; the last is the model's longest."""
        return tuple(fit.request_tokens for fit in self.fits)

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
            "refusal": self.refusal,
            **asdict(self.taken),
            "devices": [_device_dict(device, self.lengths_tokens) for device in self.devices],
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
    lengths = stated_lengths(max_model_len, lengths_tokens)
    fits = tuple(
        Fit(tokens, request_bytes(layout, tokens), requests_that_fit(layout, tokens))
        for tokens in lengths
    )
    longest = longest_request(layout, max_model_len, Limits().min_chunk_tokens)
    return PlanReport(model, architecture, manager, layout, max_model_len, longest, fits)


def stated_lengths(
    max_model_len: int, lengths_tokens: tuple[int, ...] = LENGTHS_TOKENS
) -> tuple[int, ...]:
    """Lengths within the model's own, ascending, and that one."""
    return tuple(sorted({min(n, max_model_len) for n in (*lengths_tokens, max_model_len)}))


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
