"""Compiled kernels for CPUs (csrc/attention): AMX, AVX-512 with or without bf16, AVX2, generic."""

import torch  # first: the extension then shares torch's OpenMP runtime

from kvell.attention import _kernels
from kvell.attention.checks import check_kv, check_layer, check_query, int32_pointer
from kvell.attention.host_batch import HostGroupBatch
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages, Partial
from kvell.attention.quantised import quantise
from kvell.attention.sections import SectionRecords, check_elsewhere
from kvell.errors import ChangeSomething

_EightInts = tuple[int, int, int, int, int, int, int, int]
_NineInts = tuple[int, int, int, int, int, int, int, int, int]
instruction_sets, processor_sets = _kernels.instruction_sets, _kernels.processor_sets
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class NativeKernels:
    """Attention in compiled code, for float32, bfloat16 and quantised pools in host memory.

    Within one instruction set, the result of a (token, head) is bitwise the same
    in every batch, chunk, placement and number of threads.

    :param num_threads: 0 for OpenMP's number, which ``torch.set_num_threads`` sets.
    :param instruction_set: one of :func:`instruction_sets`; None for the best.
    :raises ChangeSomething: if this processor lacks the instruction set.
    """

    name = "native"

    def __init__(self, num_threads: int = 0, instruction_set: str | None = None) -> None:
        available = instruction_sets()
        if instruction_set is not None and instruction_set not in available:
            raise ChangeSomething(
                "instruction_set",
                instruction_set,
                "this processor cannot run it",
                f"choose one of {', '.join(available)}",
            )
        self.num_threads = num_threads
        self._batches = _KnownBatches()
        self.instruction_set = instruction_set or available[0]

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Store key and value [T, kv_heads, head_size] into their pages.

        :raises ValueError: if dtypes or shapes disagree, or a page or row does not exist.
        """
        check_layer(layer, _ELEMENTS)
        check_kv(layer, batch, key, value)
        if layer.quantised:
            key = quantise(key, layer.dtype)
            value = None if value is None else quantise(value, layer.dtype)
        value = key if value is None else value
        _kernels.write_kv(
            layer_args(layer),
            key.shape[0],
            int32_pointer("write_page_ids", batch.write_page_ids),
            int32_pointer("write_offsets", batch.write_offsets),
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
        )

    def attend(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None = None,
    ) -> torch.Tensor:
        """Compute attention of query [T, heads, head_size]; return [T, heads, output_size].

        :param elsewhere: records of the sections before the tables (:class:`SectionKernels`).
        :raises ValueError: if dtypes, shapes or the batch's metadata are wrong.
        """
        if elsewhere is not None:
            check_elsewhere(layer, batch, query, params, elsewhere)
        output = torch.empty((*query.shape[:2], layer.output_size), dtype=query.dtype)
        self.attend_into(layer, batch, query, params, output, elsewhere=elsewhere)
        return output

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        output = torch.empty((*query.shape[:2], layer.output_size), dtype=torch.float32)
        maximum = torch.empty(query.shape[:2], dtype=torch.float32)
        partial = Partial(output, maximum, torch.empty_like(maximum))
        self.attend_into(layer, batch, query, params, output, partial)
        return partial

    def attend_into(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        output: torch.Tensor,
        partial: Partial | None = None,
        elsewhere: SectionRecords | None = None,
        records: SectionRecords | None = None,
    ) -> None:
        """Compute attention into ``output``, or into the records of whole sections."""
        check_layer(layer, _ELEMENTS)
        check_query(layer, query, params.sinks)
        _kernels.attend(
            self.instruction_set,
            layer_args(layer),
            self._batches.args(batch, query.shape[0]),
            query.data_ptr(),
            _ELEMENTS[query.dtype],
            query.stride(0),
            query.stride(1),
            query.shape[1],
            params.scale,
            params.window_tokens,
            params.chunk_tokens,
            params.softcap,
            0 if params.sinks is None else params.sinks.data_ptr(),
            output.data_ptr(),
            _ELEMENTS[output.dtype],
            0 if partial is None else partial.maximum.data_ptr(),
            0 if partial is None else partial.denominator.data_ptr(),
            _records_args(elsewhere),
            _records_args(records),
            self.num_threads,
        )


class _KnownBatches:
    """A cache of checked batches: all layers of a group share one batch object."""

    _LIMIT = 8

    def __init__(self) -> None:
        self._known: dict[int, tuple[GroupBatch, int, _EightInts]] = {}

    def args(self, batch: GroupBatch, tokens: int) -> _EightInts:
        entry = self._known.get(id(batch))
        if entry is not None and entry[0] is batch and entry[1] == tokens:
            return entry[2]
        args = batch_args(batch, tokens)
        if len(self._known) >= self._LIMIT:
            self._known.clear()
        self._known[id(batch)] = (batch, tokens, args)
        return args


def _records_args(records: SectionRecords | None) -> tuple[int, int]:
    return (0, 0) if records is None else (records.values.data_ptr(), records.starts.data_ptr())


def layer_args(layer: LayerPages) -> _NineInts:
    return (
        layer.pool.data_ptr(),
        layer.pool.shape[0],
        layer.page_stride_bytes,
        layer.layer_offset_bytes,
        layer.page_tokens,
        layer.kv_heads,
        layer.head_size,
        layer.value_size,
        _ELEMENTS[layer.dtype],
    )


def batch_args(batch: GroupBatch, tokens: int) -> _EightInts:
    """Return a group's metadata as the arguments of compiled modules.

    :raises ValueError: if its parts disagree in length, or are not int32 in host memory.
    """
    if isinstance(batch, HostGroupBatch):
        return (*batch.args, tokens)
    requests = batch.context_lens.shape[0]
    if batch.query_starts.shape[0] != requests + 1 or batch.table_starts.shape[0] != requests + 1:
        raise ValueError(f"batch: starts need {requests + 1} entries for {requests} requests")
    if batch.first_positions.shape[0] != requests:
        raise ValueError(f"batch: first_positions needs {requests} entries")
    return (
        requests,
        int32_pointer("query_starts", batch.query_starts),
        int32_pointer("context_lens", batch.context_lens),
        int32_pointer("table_starts", batch.table_starts),
        int32_pointer("page_ids", batch.page_ids),
        int32_pointer("first_positions", batch.first_positions),
        batch.page_ids.shape[0],
        tokens,
    )
