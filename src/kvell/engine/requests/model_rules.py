"""The rules that one of an engine's models has for its requests; knows no model itself."""

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
        """Whether it has state layers, which cannot be rolled back past a draft token."""
        return any(group.kind is GroupKind.STATE for group in self.layout.groups)
