"""The input of one step, and the model's memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from kvell.attention.host_batch import HostRows, OnHost
from kvell.attention.interface import GroupBatch, LayerPages
from kvell.attention.states import StateBatch
from kvell.models.images.image_batch import ImageBatch
from kvell.models.states.state_memory import StateMemory


@dataclass(frozen=True)
class ForwardBatch:
    """One step's work over a ragged batch of n requests with T new tokens in all.

    All tensors are on the model's device.

    :param token_ids: int64 [T], request after request.
    :param positions: int64 [T], each token's position in its own request.
    :param groups: metadata of each layer group, in the order of the layout; None if a group holds
        no text tokens.
    :param logits_rows: int64 [rows], the tokens whose logits are requested; may be empty.
    :param images: None if no request of the step has any.
    :param prompt_ends: requests whose prompts end with this step, for layers that drop tokens.
    :param wants_largest: whether the index of each row's largest logit is requested.
    :param begun: called once the pass needs no more Python; at its start if it always does.
    :param wants_hidden: whether the head's input of each row is requested too.
    :param long_rope: bool [T], tokens of texts under the long rotation table; None: there is none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBatch | StateBatch | None, ...]
    logits_rows: torch.Tensor
    images: ImageBatch | None = None
    prompt_ends: tuple[int, ...] = ()
    wants_largest: bool = False
    begun: Callable[[], None] | None = None
    wants_hidden: bool = False
    long_rope: torch.Tensor | None = None

    def put_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        self.token_ids[list(rows)] = torch.tensor(token_ids).to(self.token_ids)


class HostForwardBatch(OnHost, ForwardBatch):
    """A batch on a CPU; its rows are ``token_ids``, ``positions`` and ``logits_rows``."""

    MADE = ("token_ids", "positions", "logits_rows")

    def __init__(
        self,
        rows: HostRows,
        groups: tuple[GroupBatch | StateBatch | None, ...],
        images: ImageBatch | None = None,
        prompt_ends: tuple[int, ...] = (),
        wants_largest: bool = False,
        begun: Callable[[], None] | None = None,
        wants_hidden: bool = False,
        long_rope: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rows)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "prompt_ends", prompt_ends)
        object.__setattr__(self, "wants_largest", wants_largest)
        object.__setattr__(self, "begun", begun)
        if wants_hidden:  # rare; else the class says so
            object.__setattr__(self, "wants_hidden", True)
        if long_rope is not None:
            object.__setattr__(self, "long_rope", long_rope)

    @override
    def put_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        self.rows.flat[list(rows)] = token_ids


@dataclass(frozen=True)
class ModelMemory:
    """By layer: its pages, and the index of its group; and the memory of states."""

    pages: dict[int, LayerPages]
    groups: dict[int, int]
    states: StateMemory
