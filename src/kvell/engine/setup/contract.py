"""The memory contract: the use of every byte, stated before the first request.

With ``--kv-memory`` the KV pool has a fixed size, and activations have a separate reserve; with
``--memory`` both share the memory that weights leave.  ``contract_bytes`` is the most that the
process takes: all of these, its size before loading, the grammar processes, and an allowance for
uncounted memory.
"""

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvell.memory import Layout, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB

LINE_COLUMNS = 79
EXAMPLE_TOKENS = (1024, 4096, 16384)
LEAST_ALLOWANCE_BYTES = 64 * MIB
ALLOWANCE_PERCENT = 3
"""Allowance for library buffers, tables, messages and fragmentation, in % of counted bytes."""

Fitting = Callable[[Layout, int], int]
"""A function of a layout and a length in tokens: how many such requests decode at once."""


@dataclass(frozen=True)
class GroupContract:
    """Sizes of one layer group.

    :param name: the group's name, like ``full`` or ``sliding(512)``.
    :param layers: number of its layers.
    :param token_bytes: bytes of one token (or one state) in all its layers.
    :param page_tokens: tokens of a page; 1 for states.
    :param page_bytes: bytes of a page that hold data.
    :param padding_bytes: further bytes of a page, without data.
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
    """The requests that one of several models can serve if it has the pool alone.

    :param model: the model's name.
    :param max_model_len: most tokens of a request, prompt and answer together.
    :param requests_that_fit: (tokens of a request, requests of that length that decode at once).
    """

    model: str
    max_model_len: int
    requests_that_fit: tuple[tuple[int, int], ...]

    def request_lines(self, longest: str, together: str) -> list[str]:
        """Return a line for the longest request, and one for the requests that fit together."""
        fits = ", ".join(
            f"{count:,}{' requests' * (number == 0)} of {tokens:,}{' tokens' * (number == 0)}"
            for number, (tokens, count) in enumerate(self.requests_that_fit)
        )
        return [f"  {longest:<18}  {self.max_model_len:,} tokens", f"  {together:<18}  {fits}"]


@dataclass(frozen=True)
class MemoryContract:
    """The memory of an engine, and the requests that fit into it.

    :param model: name of the first model.
    :param weights_bytes: weights of all models.
    :param kv_pool_bytes: most bytes of KV cache.
    :param activation_reserve_bytes: reserve for activations; 0 if they share the pool.
    :param large_page_bytes: size of a large page.
    :param num_large_pages: large pages of the pool.
    :param max_model_len: most tokens of a request, prompt and answer together.
    :param groups: sizes of every layer group.
    :param requests_that_fit: (tokens of a request, requests of that length that decode at once).
    :param shared_bytes: size of a pool that KV cache and activations share; 0 without one.
    :param floor_bytes: size of the process before it loaded anything.
    :param cpu_buffer_bytes: host memory for pages that are not in the pool; part of the process on
        any device.
    :param grammar_bytes: memory of the grammar processes, once they run; 0 for models without a
        tokenizer.
    :param steps: a remark on how steps are planned; "" for none.
    :param beside: further models that share the pool; ``max_model_len`` and
        ``requests_that_fit`` apply to the first model.
    :param dtype: dtype of the first model's computation; "" if it computes nothing.
    :param stored_as: lines about models whose files have quantised weights.
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
    dtype: str = ""
    stored_as: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The bytes of weights, KV cache and activations."""
        pool_bytes = self.shared_bytes or self.kv_pool_bytes + self.activation_reserve_bytes
        return self.weights_bytes + pool_bytes

    @property
    def allowance_bytes(self) -> int:
        """The allowance for uncounted memory."""
        return max(LEAST_ALLOWANCE_BYTES, self.total_bytes * ALLOWANCE_PERCENT // 100)

    @property
    def contract_bytes(self) -> int:
        """The most that the process takes, including its grammar processes."""
        counted_bytes = self.total_bytes + self.cpu_buffer_bytes + self.grammar_bytes
        return counted_bytes + self.floor_bytes + self.allowance_bytes

    def parts(self) -> dict[str, int]:
        """Return every part in bytes, by name, and their sum."""
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
        """Return the contract as JSON-ready values."""
        return {**asdict(self), **self.parts(), "total_bytes": self.total_bytes}

    def lines(self) -> list[str]:
        """Return the contract as lines of text for users, of at most ``LINE_COLUMNS`` columns."""
        first = ModelShare(self.model, self.max_model_len, self.requests_that_fit)
        names = ", ".join(share.model for share in (first, *self.beside))
        lines = [
            f"memory contract for {names}" + (f", {self.dtype}" if self.dtype else ""),
            f"  weights             {size(self.weights_bytes)}",
            *(f"    stored as {line}" for line in self.stored_as),
            f"  KV pool             {size(self.kv_pool_bytes)}  "
            f"({self.num_large_pages:,} large pages of {size(self.large_page_bytes).strip()})",
            *(
                f"    {group.name}: {group.layers} layers, {size(group.token_bytes).strip()} a "
                f"token, pages of {group.page_tokens} tokens = {size(group.page_bytes).strip()}"
                for group in self.groups
            ),
            self._activation_line(),
            *self._line("CPU buffer", self.cpu_buffer_bytes),
            f"  total               {size(self.total_bytes)}",
            *self._line("grammars", self.grammar_bytes),
            f"  process, at most    {size(self.contract_bytes)}  "
            f"({size(self.floor_bytes).strip()} at start, "
            f"{size(self.allowance_bytes).strip()} spare)",
            *first.request_lines("longest request", "together"),
            *(
                line
                for share in self.beside
                for line in share.request_lines(
                    f"longest to {share.model}", f"together to {share.model}"
                )
            ),
            *([f"  steps               {self.steps}"] if self.steps else []),
        ]
        return [part for line in lines for part in in_columns(line)]

    @staticmethod
    def _line(title: str, num_bytes: int) -> list[str]:
        return [f"  {title:<18}  {size(num_bytes)}"] if num_bytes else []

    def _activation_line(self) -> str:
        if self.shared_bytes:
            return f"  activations         in the pool, {size(self.shared_bytes).strip()} for both"
        return f"  activation reserve  {size(self.activation_reserve_bytes)}"


def model_share(
    model: str, layout: Layout, max_model_len: int, fitting: Fitting = requests_that_fit
) -> ModelShare:
    fits = requests_by_length(layout.held_by(model), max_model_len, fitting)
    return ModelShare(model, max_model_len, fits)


def requests_by_length(
    layout: Layout, max_model_len: int, fitting: Fitting = requests_that_fit
) -> tuple[tuple[int, int], ...]:
    """Return (length in tokens, requests that decode at once) for lengths up to the longest."""
    lengths = [n for n in EXAMPLE_TOKENS if n < max_model_len] + [max_model_len]
    return tuple((n, fitting(layout, n)) for n in lengths)


def make_contract(
    model: str,
    layout: Layout,
    weights_bytes: int,
    reserve_bytes: int,
    max_model_len: int,
    beside: tuple[ModelShare, ...] = (),
    fitting: Fitting = requests_that_fit,
) -> MemoryContract:
    """Return the contract of an engine before it serves, without what is beside its pool.

    :param layout: layout of the whole pool; with several models, groups have their models' names.
    """
    seen = layout.held_by(model) if beside else layout
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
        requests_by_length(seen, max_model_len, fitting),
        beside,
    )


def in_columns(line: str) -> list[str]:
    title = " " * 22
    return textwrap.wrap(line, LINE_COLUMNS, subsequent_indent=title, break_on_hyphens=False)


def size(num_bytes: int) -> str:
    """Return a size in its largest unit, right-aligned, with one decimal: `` 256.0 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:7.1f} {name}"
    return f"{num_bytes:7d} B"
