"""The memory contract: where every byte goes, stated before the first request.

With ``--kv-memory`` the KV pool has a size of its own, and activations a reserve beside it; with
``--memory`` both share what weights leave.  ``contract_bytes`` is the most that the process takes:
all of these, its size before it loaded anything, the processes that follow grammars, and an
allowance for what is not counted.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvell.memory import Layout, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB

EXAMPLE_TOKENS = (1024, 4096, 16384)
LEAST_ALLOWANCE_BYTES = 64 * MIB
ALLOWANCE_PERCENT = 3
"""Of the counted bytes, for library buffers, tables, messages, allocator fragmentation."""

Fitting = Callable[[Layout, int], int]
"""From a layout and a length in tokens: how many requests of that length decode at once."""


@dataclass(frozen=True)
class GroupContract:
    """Sizes of one layer group.

    :param name: what the group is called, like ``full`` or ``sliding(512)``.
    :param layers: number of its layers.
    :param token_bytes: bytes that one token (or one state) needs, over all its layers.
    :param page_tokens: tokens that a page holds; 1 for states.
    :param page_bytes: bytes of a page that hold data.
    :param padding_bytes: further bytes of a page that hold nothing.
    :param pages_per_large: pages in a large page.
    """

    name: str
    layers: int
    token_bytes: int
    page_tokens: int
    page_bytes: int
    padding_bytes: int
    pages_per_large: int


@dataclass(frozen=True)
class ModelShare:
    """What one of several models can serve while it has the pool to itself.

    :param model: its name.
    :param max_model_len: most tokens of a request, prompt and answer together.
    :param requests_that_fit: (tokens of a request, requests of that length that decode at once).
    """

    model: str
    max_model_len: int
    requests_that_fit: tuple[tuple[int, int], ...]

    def line(self, title: str) -> str:
        """A line with its longest request, and how many requests of each length fit."""
        fits = ", ".join(f"{count} of {tokens:,}" for tokens, count in self.requests_that_fit)
        return f"  {title:<18}  {self.max_model_len:,} tokens; at once: {fits} tokens"


@dataclass(frozen=True)
class MemoryContract:
    """The memory an engine takes, and the requests that fit into it.

    :param model: name of the first model.
    :param weights_bytes: of all models' weights.
    :param kv_pool_bytes: most bytes of KV cache.
    :param activation_reserve_bytes: beside it; 0 where activations share the pool.
    :param large_page_bytes: size of a large page.
    :param num_large_pages: large pages of the pool.
    :param max_model_len: most tokens of a request, prompt and answer together.
    :param groups: sizes of every layer group.
    :param requests_that_fit: (tokens of a request, requests of that length that decode at once).
    :param shared_bytes: of the pool that both share; 0 if they share none.
    :param floor_bytes: of the process before it loaded anything.
    :param cpu_buffer_bytes: of host memory for pages that are not on the device; part of the
        process, whether or not the device is a CPU.
    :param grammar_bytes: of the processes in which answers' grammars are compiled and followed,
        once there is one; 0 for models without a tokenizer.
    :param steps: a remark on how steps are planned; "" for none.
    :param beside: further models that share the pool; ``max_model_len`` and
        ``requests_that_fit`` are the first one's.
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
    shared_bytes: int = 0
    floor_bytes: int = 0
    cpu_buffer_bytes: int = 0
    grammar_bytes: int = 0
    steps: str = ""

    @property
    def total_bytes(self) -> int:
        """Weights, KV cache and activations."""
        pool_bytes = self.shared_bytes or self.kv_pool_bytes + self.activation_reserve_bytes
        return self.weights_bytes + pool_bytes

    @property
    def allowance_bytes(self) -> int:
        """Allowance for memory that is not counted one by one."""
        return max(LEAST_ALLOWANCE_BYTES, self.total_bytes * ALLOWANCE_PERCENT // 100)

    @property
    def contract_bytes(self) -> int:
        """The most that the process takes, with those that it starts for grammars."""
        counted_bytes = self.total_bytes + self.cpu_buffer_bytes + self.grammar_bytes
        return counted_bytes + self.floor_bytes + self.allowance_bytes

    def parts(self) -> dict[str, int]:
        """Every part in bytes, by name, and their sum."""
        return {
            "weights_bytes": self.weights_bytes,
            "kv_pool_bytes": self.kv_pool_bytes,
            "activation_reserve_bytes": self.activation_reserve_bytes,
            "shared_bytes": self.shared_bytes,
            "cpu_buffer_bytes": self.cpu_buffer_bytes,
            "grammar_bytes": self.grammar_bytes,
            "floor_bytes": self.floor_bytes,
            "allowance_bytes": self.allowance_bytes,
            "contract_bytes": self.contract_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """The contract as JSON-ready values."""
        return {**asdict(self), **self.parts(), "total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """The contract as lines of text for users."""
        own = ModelShare(self.model, self.max_model_len, self.requests_that_fit)
        models = (own, *self.beside)
        return [
            f"memory contract for {', '.join(one.model for one in models)}",
            f"  weights             {size(self.weights_bytes)}",
            f"  KV pool             {size(self.kv_pool_bytes)}  "
            f"({self.num_large_pages:,} large pages of {size(self.large_page_bytes).strip()})",
            *(f"    {_group_line(group)}" for group in self.groups),
            self._activation_line(),
            *self._line("CPU buffer", self.cpu_buffer_bytes),
            f"  total               {size(self.total_bytes)}",
            *self._line("grammars", self.grammar_bytes),
            f"  process, at most    {size(self.contract_bytes)}  "
            f"(with {size(self.floor_bytes).strip()} of its own "
            f"and {size(self.allowance_bytes).strip()} to spare)",
            own.line("longest request"),
            *(one.line(f"longest to {one.model}") for one in self.beside),
            *([f"  steps               {self.steps}"] if self.steps else []),
        ]

    @staticmethod
    def _line(title: str, num_bytes: int) -> list[str]:
        """The line of a part that not every contract has."""
        return [f"  {title:<18}  {size(num_bytes)}"] if num_bytes else []

    def _activation_line(self) -> str:
        if self.shared_bytes:
            return f"  activations         in the pool, {size(self.shared_bytes).strip()} for both"
        return f"  activation reserve  {size(self.activation_reserve_bytes)}"


def model_share(
    model: str, layout: Layout, max_model_len: int, fitting: Fitting = requests_that_fit
) -> ModelShare:
    """What one of several models can serve while it has the pool to itself."""
    fits = requests_by_length(layout.seen_by(model), max_model_len, fitting)
    return ModelShare(model, max_model_len, fits)


def requests_by_length(
    layout: Layout, max_model_len: int, fitting: Fitting = requests_that_fit
) -> tuple[tuple[int, int], ...]:
    """(length in tokens, requests that decode at once) for a few lengths up to the longest."""
    lengths = [n for n in EXAMPLE_TOKENS if n < max_model_len] + [max_model_len]
    return tuple((n, fitting(layout, n)) for n in lengths)


def make_contract(
    model: str,
    layout: Layout,
    weights_bytes: int,
    reserve_bytes: int,
    max_model_len: int,
    beside: tuple[ModelShare, ...] = (),
    *,
    shared_bytes: int = 0,
    floor_bytes: int = 0,
    cpu_buffer_bytes: int = 0,
    grammar_bytes: int = 0,
    fitting: Fitting = requests_that_fit,
    steps: str = "",
) -> MemoryContract:
    """The contract of an engine that is about to serve.

    :param layout: of the whole pool; with several models, groups carry their names.
    :param shared_bytes: of the pool, if activations share it; there is no reserve then.
    :param floor_bytes: of the process before it loaded anything.
    :param steps: a remark on how steps are planned; "" for none.
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
        requests_by_length(own, max_model_len, fitting),
        beside,
        shared_bytes,
        floor_bytes,
        cpu_buffer_bytes,
        grammar_bytes,
        steps,
    )


def size(num_bytes: int) -> str:
    """A size in its largest unit, right-aligned, with one decimal: `` 256.0 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:7.1f} {name}"
    return f"{num_bytes:7d} B"


def _group_line(group: GroupContract) -> str:
    return (
        f"{group.name}: {group.layers} layers, {size(group.token_bytes).strip()} a token, "
        f"pages of {group.page_tokens} tokens = {size(group.page_bytes).strip()}"
    )
