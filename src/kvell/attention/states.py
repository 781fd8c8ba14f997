"""A step's metadata of one state group: pages of states, and the tokens after which to save one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateBatch:
    """One state group's metadata for one step over a ragged batch of n requests, T new tokens.

    All tensors are int32.  Counts are on the CPU, which cuts scans by them; page ids are on the
    pool's device.

    :param query_starts: [n+1], request i's new tokens are rows query_starts[i]:query_starts[i+1].
    :param starts: [n], tokens before this step.  If 0, the state is zero and its pages are only
        written; else the pages hold the running state.
    :param page_ids: [n, slices], physical pages of the running states.
    :param cut_requests: [c], indices of requests whose intermediate state is saved …
    :param cut_tokens: [c], … after this number of tokens of the step (1 or more).
    :param cut_page_ids: [c, slices], physical pages for the saved states.
    :param end_page_ids: [n, slices], physical pages for the state after each request's last
        token, -1 if it is not stored; None if all states stay in ``page_ids``.
    """

    query_starts: torch.Tensor
    starts: torch.Tensor
    page_ids: torch.Tensor
    cut_requests: torch.Tensor
    cut_tokens: torch.Tensor
    cut_page_ids: torch.Tensor
    end_page_ids: torch.Tensor | None = None
