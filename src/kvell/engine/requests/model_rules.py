"""Rules of one of an engine's models for its requests, without the model itself."""

from dataclasses import dataclass
from functools import cached_property

from kvell.engine.protocol.statistics import ModelLengths
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, Layout


@dataclass(frozen=True)
class ModelRules:
    """The rules of one model.

    :param name: name of the model in requests; "" if an engine has only one model.
    :param limits: limits of the engine, with the lengths and token ids of this model.
    :param layout: the pool with the groups that its requests hold pages of.
    :param takes_images: whether prompts may have images.
    :param has_head: whether the model writes text; if not, it serves embeddings alone.
    """

    name: str
    limits: Limits
    eos_token_ids: frozenset[int]
    layout: Layout
    takes_images: bool = True
    has_head: bool = True

    def lengths(self, *, borrows: bool) -> ModelLengths:
        """Return the longest requests.

        :param borrows: whether the instance may borrow memory of others.
        """
        reach_tokens = self.limits.reach_tokens if borrows else 0
        return ModelLengths(self.limits.max_model_len, reach_tokens)

    def head_problem(self, model: str) -> ChangeSomething | None:
        """Return the refusal of a request for text to a model without a head; None if it has one.

        :param model: the model's name in messages.
        """
        if self.has_head:
            return None
        problem = "cannot write text: tie_word_embeddings is false, and no file has lm_head.weight"
        remedy = "ask for embeddings, or use a checkpoint with lm_head.weight"
        return ChangeSomething("model", model, problem, remedy)

    @cached_property
    def has_states(self) -> bool:
        """Whether the model has state layers, which cannot be rolled back past a draft token."""
        return any(group.kind is GroupKind.STATE for group in self.layout.groups)
