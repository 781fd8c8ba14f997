"""What one of several models of an engine asks of its requests; knows no model itself."""

from dataclasses import dataclass
from functools import cached_property

from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, Layout


@dataclass(frozen=True)
class ModelRules:
    """The rules of one model.

    :param name: what requests call it; "" where an engine has one model only.
    :param limits: the engine's, with the lengths and token ids of this model.
    :param layout: the pool with the groups that its requests hold pages of.
    """

    name: str
    limits: Limits
    eos_token_ids: frozenset[int]
    layout: Layout

    @cached_property
    def has_states(self) -> bool:
        """Has it layers that cannot go back to before a guess?"""
        return any(group.kind is GroupKind.STATE for group in self.layout.groups)
