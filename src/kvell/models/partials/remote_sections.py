"""The debtor's side: sections of a step's requests that creditors compute.

Per layer, a request's query rows are sent as soon as they are computed. Meanwhile the compiled pass
computes the local sections, and a pass by modules writes keys and values. Then the creditors'
records are folded first, in the order of positions. The result is bit-identical to that with local
pages only (Infinite-LLM §4, equations 2 and 3).

A creditor that answers too late, or refuses, is not asked any more in that pass. Requests that lack
records are *missed*, like those whose mapped pages have a new owner
(:attr:`kvell.engine.requests.plan.StepResult.missed`): the pass's results for them do not count,
and they change no other row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvell.attention.interface import AttendParams, GroupBatch
from kvell.attention.sections import SectionRecords
from kvell.models.partials.served_layers import ServedLayers

if TYPE_CHECKING:
    from kvell.models.partials import _partials


MODEL_SHIFT = 56
MEETING_SHIFT = 32
"""A query's number: the model, the meeting with creditors, and a count."""


def model_of(query: bytes) -> int:
    """Return the number of the model whose pass has sent a query; 0 for an unreadable one."""
    return int.from_bytes(query[:8], "little") >> MODEL_SHIFT


@dataclass(frozen=True)
class SectionRun:
    """Consecutive sections of one request that one creditor holds.

    Runs of a request follow each other from section 0 on; the request's tables begin at their end.

    :param first_section: positions from ``first_section * SECTION_TOKENS`` on.
    :param rights: numbers of the loans by which they are read, one for each section.
    """

    request: int
    creditor: str
    first_section: int
    rights: tuple[int, ...]


class RemoteSections:
    """The creditors of a model's passes, and the queries of the next pass.

    :param creditors: by name, of :mod:`kvell.models.partials._partials`.
        The set may change between passes.
    :param number: the model's index in its instance, whose models share their connections.
    """

    def __init__(self, creditors: Mapping[str, "_partials.Creditor"], number: int = 0) -> None:
        self._number = number
        self._meetings = 0
        self.meet(creditors)
        self._patience_seconds = 0.0

    def meet(self, creditors: Mapping[str, "_partials.Creditor"]) -> None:
        """Use these creditors from the next pass on, and no others."""
        from kvell.models.partials import _partials

        self._names = list(creditors)
        self._meetings += 1  # a late answer to a query before this meeting must fit no new query
        first = self._number << MODEL_SHIFT | self._meetings << MEETING_SHIFT
        self._compiled = _partials.Away(list(creditors.values()), first)
        self._runs: Sequence[SectionRun] = ()
        self._asked = False

    def expect(self, runs: Sequence[SectionRun], patience_seconds: float) -> None:
        """Set the queries of the next pass; later passes have none.

        :param patience_seconds: for all answers of the pass together, from its start on. The time
            spent on a creditor that is then given up is added for the others.
        :raises ValueError: if a run names an unknown creditor.
        """
        for run in runs:
            if run.creditor not in self._names:
                raise ValueError(f"runs: {run.creditor} is not a creditor of this pass")
        self._runs, self._patience_seconds = runs, patience_seconds

    def to_compiled(self, groups: Sequence[int]) -> "_partials.Away | None":
        """Return the queries in the compiled pass's form; None if all sections are local.

        :param groups: with full attention, as the pass counts them.
        """
        self._asked = bool(self._runs)
        if not self._asked:
            return None
        number = {name: index for index, name in enumerate(self._names)}
        runs = [
            (group, run.request, number[run.creditor], run.first_section, run.rights)
            for group in groups
            for run in self._runs
        ]
        self._runs = ()
        self._compiled.expect(runs, self._patience_seconds)
        return self._compiled

    def layer_queries(
        self, served: ServedLayers, groups: Sequence[object], num_tokens: int
    ) -> "LayerQueries | None":
        """Return the queries for a pass in Python; None if all sections are local.

        :param served: the pass's layers.
        :param groups: metadata of each group of the model, as in ``ForwardBatch``.
        :raises ValueError: if the runs do not fit the groups.
        """
        compiled = self.to_compiled(range(len(served.full_groups)))
        if compiled is None:
            return None
        return LayerQueries(compiled, served, groups, num_tokens)

    @property
    def lacking(self) -> list[int]:
        return self._compiled.missed() if self._asked else []


_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


class LayerQueries:
    """The queries of one pass in Python: each layer sends its rows, and then takes records.

    Layers call in order, each taking its records before the next one sends.
    """

    def __init__(
        self,
        compiled: "_partials.Away",
        served: ServedLayers,
        groups: Sequence[object],
        num_tokens: int,
    ) -> None:
        self._compiled, self._layers = compiled, served.layers
        full = served.full_groups
        self._index = {group: index for index, group in enumerate(full)}
        page_tokens = {layer.group: layer.pages.page_tokens for layer in served.layers}
        compiled.begin([(_args(groups[group], num_tokens), page_tokens[group]) for group in full])
        self._sent: tuple[_partials.AwayLayer, torch.Tensor] | None = None

    def send_rows(self, layer: int, query: torch.Tensor, params: AttendParams) -> None:
        """Send the query rows of requests with remote sections, if the layer reads any.

        :param layer: its index among the layers that attend to text.
        :param query: [T, heads, head_size] of all requests.
        :param params: the parameters of the call that the records are for; it applies the sinks.
        """
        served = self._layers[layer]
        group = self._index.get(served.group)
        if group is None or not self._compiled.reads(group):
            return
        rows = query.contiguous()
        size = (served.pages.head_size, served.pages.output_size)
        shape = (query.shape[1], *size, _ELEMENTS[query.dtype])
        scores = (params.scale, params.softcap)
        layer_query = (layer, group, shape, *scores, rows.data_ptr())
        self._compiled.post(layer_query)
        self._sent = layer_query, rows

    def take_records(self) -> SectionRecords | None:
        """Wait for the records of the layer that has sent; None if it reads local sections only.

        They are valid until the next layer sends.
        """
        if self._sent is None:
            return None
        layer_query, _ = self._sent
        self._compiled.wait(layer_query)
        self._sent = None
        values, starts = self._compiled.records(layer_query)
        return SectionRecords(torch.from_numpy(starts), torch.from_numpy(values))


def _args(group: object, num_tokens: int) -> "_partials.Batch":
    from kvell.attention.native import batch_args

    if not isinstance(group, GroupBatch):
        raise RuntimeError("the step has no metadata for a group of keys and values")
    return batch_args(group, num_tokens)
