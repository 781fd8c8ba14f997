"""What a step says about one state group: where states lie, and after which tokens to keep them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateBatch:
    """One state group's metadata for one step over a ragged batch of n requests, T new tokens.

    All tensors are int32.  Counts are on the CPU, where they decide how scans are cut; page
    ids are on the pool's device.

    :param query_starts: [n+1], request i's new tokens are rows query_starts[i]:query_starts[i+1].
    :param starts: [n], tokens before this step.  Where there are none the state is zero, and
        its pages are written only; else they hold the running state.
    :param page_ids: [n, slices], physical pages of the running states.
    :param cut_requests: [c], indices of requests whose state is wanted on the way …
    :param cut_tokens: [c], … after so many tokens of this step (1 or more).
    :param cut_page_ids: [c, slices], physical pages that take those states.
    :param end_page_ids: [n, slices], physical pages that take the states after each request's
        last token, -1 where nothing does; None if all go on where they were.
    """

    query_starts: torch.Tensor
    starts: torch.Tensor
    page_ids: torch.Tensor
    cut_requests: torch.Tensor
    cut_tokens: torch.Tensor
    cut_page_ids: torch.Tensor
    end_page_ids: torch.Tensor | None = None
