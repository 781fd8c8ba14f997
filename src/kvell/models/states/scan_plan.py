"""Division of a ragged batch into pieces that scans process side by side.

A request's new tokens are cut at every multiple of ``SCAN_TOKENS`` of its own positions and at
every kept state. The pieces of a *lane* are padded to one length; its round r holds the r-th piece
of every request that has one, requests with more pieces first, so that the states of a round are a
prefix of the lane's::

    lane   request  round 0   round 1   round 2
             b      [------]  [------]  [--]
             a      [--]cut   [------]
             c      [---]

Decodes have a lane of their own: one token, one round, no padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.states import StateBatch

SCAN_TOKENS = 64
"""Scan pieces end at multiples of this position, so they do not depend on prefill chunks."""

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Round:
    """Pieces ``first … end-1`` of a lane, one for each of its first ``end - first`` requests.

    :param cut_ranks: int64 [k], the requests whose states are kept now; None if there are none.
    :param cuts: int64 [k], the index of each one's cut in the batch.
    """

    first: int
    end: int
    cut_ranks: torch.Tensor | None
    cuts: torch.Tensor | None


@dataclass(frozen=True)
class Lane:
    """Requests that are scanned together, in P pieces of L tokens.

    :param requests: int64 [m], most pieces first; None for all requests in batch order.
    :param rows: int64 [P × L], the token at each place; any token for padding.
    :param shape: P and L.
    :param padding: bool [P, L], places without a token; None if there are none.
    :param tokens: int64, places that hold tokens; None for all of them.
    :param rounds: in order.
    """

    requests: torch.Tensor | None
    rows: torch.Tensor
    shape: tuple[int, int]
    padding: torch.Tensor | None
    tokens: torch.Tensor | None
    rounds: tuple[Round, ...]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Gather [T, …] → [P, L, …], with zeros at places without a token."""
        taken = values.index_select(0, self.rows).view(*self.shape, *values.shape[1:])
        if self.padding is None:
            return taken
        mask = self.padding.view(*self.shape, *[1] * (values.dim() - 1))
        return taken.masked_fill_(mask, 0)

    def put(self, pieces: torch.Tensor, values: torch.Tensor) -> None:
        """Write [P, L, …] to the tokens' rows of ``values`` [T, …]."""
        flat = pieces.flatten(0, 1)
        if self.tokens is None:
            values.index_copy_(0, self.rows, flat)
        else:
            values.index_copy_(0, self.rows[self.tokens], flat[self.tokens])


@dataclass(frozen=True)
class ScanPlan:
    """The scans of a state group's step; tensors are int64 on the device of the pages.

    :param lanes: together they hold every request with new tokens once.
    :param request_of_row: [T], the request of each token.
    :param ends: [n], the row after each request's last one.
    :param cut_requests: [c], the request of each cut.
    :param cut_ends: [c], the row after the last one that each cut's state covers.
    :param fresh: bool [n], requests without a state yet; None if all have one.
    """

    lanes: tuple[Lane, ...]
    request_of_row: torch.Tensor
    ends: torch.Tensor
    cut_requests: torch.Tensor
    cut_ends: torch.Tensor
    fresh: torch.Tensor | None


@dataclass(frozen=True)
class DecodeStateBatch(StateBatch):
    """A state group's metadata whose plan is made already, and holds whatever the pages are."""

    plan: ScanPlan = field(kw_only=True)

    @staticmethod
    def of_decodes(page_ids: torch.Tensor) -> "DecodeStateBatch":
        """Return the metadata of requests that each go on by one token.

        :param page_ids: int32 [n, slices], which may be filled again for every step.
        """
        count = len(page_ids)
        none = torch.zeros(0, dtype=torch.int32)
        counts = torch.arange(count + 1, dtype=torch.int32)
        batch = StateBatch(counts, torch.ones_like(counts[1:]), page_ids, none, none, page_ids[:0])
        return DecodeStateBatch(
            *(getattr(batch, item.name) for item in fields(batch)), plan=plan_scans(batch)
        )


def plan_scans(batch: StateBatch) -> ScanPlan:
    if isinstance(batch, DecodeStateBatch):
        return batch.plan
    device = batch.page_ids.device
    rows = batch.query_starts.numpy().astype(np.int64)
    starts = batch.starts.numpy().astype(np.int64)
    cut_requests = batch.cut_requests.numpy().astype(np.int64)
    cut_ends = rows[cut_requests] + batch.cut_tokens.numpy()
    counts = np.diff(rows)
    fresh = starts == 0
    return ScanPlan(
        lanes=tuple(_lanes(rows, starts, cut_requests, cut_ends, device)),
        request_of_row=_on(np.repeat(np.arange(len(counts)), counts), device),
        ends=_on(rows[1:], device),
        cut_requests=_on(cut_requests, device),
        cut_ends=_on(cut_ends, device),
        fresh=torch.from_numpy(fresh).to(device) if fresh.any() else None,
    )


def _lanes(
    rows: Longs, starts: Longs, cut_requests: Longs, cut_ends: Longs, device: torch.device
) -> list[Lane]:
    counts = np.diff(rows)
    singles, others = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    lanes = []
    if len(singles):
        pieces = np.stack([rows[singles], rows[singles] + 1], 1)
        lanes.append(_lane(singles, [pieces], cut_requests, cut_ends, len(counts), device))
    if len(others):
        ends = {int(r): cut_ends[cut_requests == r] for r in others}
        split = {int(r): _pieces(rows[r], rows[r + 1], starts[r], ends[int(r)]) for r in others}
        ranked = np.asarray(sorted(split, key=lambda r: -len(split[r])), np.int64)
        rounds = [
            np.asarray([split[int(r)][i] for r in ranked if len(split[int(r)]) > i], np.int64)
            for i in range(len(split[int(ranked[0])]))
        ]
        lanes.append(_lane(ranked, rounds, cut_requests, cut_ends, len(counts), device))
    return lanes


def _pieces(first: int, end: int, start: int, cut_ends: Longs) -> list[tuple[int, int]]:
    """Cut rows first … end-1, the first of which is token ``start``, into pieces."""
    to_multiple = SCAN_TOKENS - start % SCAN_TOKENS
    edges = {*range(first + to_multiple, end, SCAN_TOKENS), *cut_ends.tolist(), end} - {first}
    ordered = sorted(edges)
    return list(zip([int(first), *ordered[:-1]], ordered, strict=True))


def _lane(
    requests: Longs,
    rounds: Sequence[Longs],
    cut_requests: Longs,
    cut_ends: Longs,
    num_requests: int,
    device: torch.device,
) -> Lane:
    """Make a lane.

    :param rounds: for each round int64 [b, 2], first row and end of each piece.
    """
    pieces = np.concatenate(rounds)
    lengths = pieces[:, 1] - pieces[:, 0]
    longest = int(lengths.max())
    places = np.arange(longest)[None, :]
    padding = places >= lengths[:, None]
    table = np.where(padding, pieces[:, :1], pieces[:, :1] + places)
    padded = bool(padding.any())
    in_order = len(requests) == num_requests and bool((np.diff(requests) > 0).all())
    return Lane(
        requests=None if in_order else _on(requests, device),
        rows=_on(table.reshape(-1), device),
        shape=(len(pieces), longest),
        padding=torch.from_numpy(padding).to(device) if padded else None,
        tokens=_on(np.flatnonzero(~padding.reshape(-1)), device) if padded else None,
        rounds=tuple(_rounds(requests, rounds, cut_requests, cut_ends, device)),
    )


def _rounds(
    requests: Longs,
    rounds: Sequence[Longs],
    cut_requests: Longs,
    cut_ends: Longs,
    device: torch.device,
) -> list[Round]:
    made, first = [], 0
    for pieces in rounds:
        rank_of = {
            (int(r), int(end)): i for i, (r, (_, end)) in enumerate(_named(requests, pieces))
        }
        wanted = zip(cut_requests.tolist(), cut_ends.tolist(), strict=True)
        kept = [(rank_of[key], cut) for cut, key in enumerate(wanted) if key in rank_of]
        pairs = _on(np.asarray(kept, np.int64), device) if kept else None
        ranks, cuts = (None, None) if pairs is None else (pairs[:, 0], pairs[:, 1])
        made.append(Round(first, first + len(pieces), ranks, cuts))
        first += len(pieces)
    return made


def _named(requests: Longs, pieces: Longs) -> Iterator[tuple[int, list[int]]]:
    return zip(requests[: len(pieces)].tolist(), pieces.tolist(), strict=True)


def _on(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
