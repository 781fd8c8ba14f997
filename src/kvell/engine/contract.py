"""The memory contract: where every byte goes, said before the first request.

First form: weights, KV pool and a fixed activation reserve, from ``--kv-memory``
alone.
"""

from dataclasses import asdict, dataclass
from typing import Any

from kvell.memory import Layout, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB

EXAMPLE_TOKENS = (1024, 4096, 16384)


@dataclass(frozen=True)
class GroupContract:
    """What one layer group costs."""

    name: str
    layers: int
    token_bytes: int
    page_tokens: int
    page_bytes: int
    padding_bytes: int
    pages_per_large: int


@dataclass(frozen=True)
class ModelShare:
    """What one of several models can do with the pool while the others leave it alone."""

    model: str
    max_model_len: int
    requests_that_fit: tuple[tuple[int, int], ...]

    def line(self, title: str) -> str:
        """Its longest request, and how many of which length fit."""
        fits = ", ".join(f"{count} of {tokens:,}" for tokens, count in self.requests_that_fit)
        return f"  {title:<18}  {self.max_model_len:,} tokens; at once: {fits} tokens"


@dataclass(frozen=True)
class MemoryContract:
    """What is taken, and what fits into it.

    :param beside: further models that share the pool; lengths above are of the first one's.
    """

    model: str
    weights_bytes: int
    kv_pool_bytes: int
    activation_reserve_bytes: int
    large_page_bytes: int
    num_large_pages: int
    max_model_len: int
    groups: tuple[GroupContract, ...]
    requests_that_fit: tuple[tuple[int, int], ...]
    beside: tuple[ModelShare, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Everything the contract names."""
        return self.weights_bytes + self.kv_pool_bytes + self.activation_reserve_bytes

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """For people."""
        own = ModelShare(self.model, self.max_model_len, self.requests_that_fit)
        models = (own, *self.beside)
        return [
            f"memory contract for {', '.join(one.model for one in models)}",
            f"  weights             {size(self.weights_bytes)}",
            f"  KV pool             {size(self.kv_pool_bytes)}  "
            f"({self.num_large_pages:,} large pages of {size(self.large_page_bytes).strip()})",
            *(f"    {_group_line(group)}" for group in self.groups),
            f"  activation reserve  {size(self.activation_reserve_bytes)}",
            f"  total               {size(self.total_bytes)}",
            own.line("longest request"),
            *(one.line(f"longest to {one.model}") for one in self.beside),
        ]


def model_share(model: str, layout: Layout, max_model_len: int) -> ModelShare:
    """What one of several models can do with the pool."""
    fits = requests_by_length(layout.seen_by(model), max_model_len)
    return ModelShare(model, max_model_len, fits)


def requests_by_length(layout: Layout, max_model_len: int) -> tuple[tuple[int, int], ...]:
    """(length in tokens, requests that decode at once) for a few lengths up to the longest."""
    lengths = [n for n in EXAMPLE_TOKENS if n < max_model_len] + [max_model_len]
    return tuple((n, requests_that_fit(layout, n)) for n in lengths)


def make_contract(
    model: str,
    layout: Layout,
    weights_bytes: int,
    reserve_bytes: int,
    max_model_len: int,
    beside: tuple[ModelShare, ...] = (),
) -> MemoryContract:
    """The contract of an engine that is about to serve.

    :param layout: of the whole pool; groups carry the names of several models.
    """
    own = layout.seen_by(model) if beside else layout
    return MemoryContract(
        model,
        weights_bytes,
        layout.pool_bytes,
        reserve_bytes,
        layout.large_page_bytes,
        layout.num_large_pages,
        max_model_len,
        tuple(
            GroupContract(
                group.name,
                len(group.layers),
                group.token_bytes,
                group.page_tokens,
                group.page_bytes,
                group.padding_bytes,
                group.pages_per_large,
            )
            for group in layout.groups
        ),
        requests_by_length(own, max_model_len),
        beside,
    )


def size(num_bytes: int) -> str:
    """Right-aligned, three digits: `` 256.0 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:7.1f} {name}"
    return f"{num_bytes:7d} B"


def _group_line(group: GroupContract) -> str:
    return (
        f"{group.name}: {group.layers} layers, {size(group.token_bytes).strip()} a token, "
        f"pages of {group.page_tokens} tokens = {size(group.page_bytes).strip()}"
    )
