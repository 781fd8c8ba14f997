"""Several independent models in one engine: what differs between them, and what is refused.

They share the pool, the scheduler and every step's budget.  A request names its model and
holds pages of that model's groups only, so memory goes where the load is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvell.engine.sampling.controls import Controls
from kvell.engine.sampling.grammars import Grammars, process_bytes_for
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, LayerSpec
from kvell.models.paged_model import PagedModel

UNSERVED = {
    GroupKind.CROSS: "takes images",
    GroupKind.VISION: "takes images",
    GroupKind.DROPPING: "keeps a budget of a prompt's tokens",
}
"""Group kinds that a model served beside others may not have, and what they are for."""


@dataclass(frozen=True)
class ServedModel:
    """A model, and the name by which requests ask for it.

    :param name: "" where an engine has one model only.
    :param tokenizer_json: gives its tokenizer, for grammars; None if it has none.
    """

    name: str
    model: PagedModel
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    tokenizer_json: Callable[[], str] | None = None

    def controls(self) -> Controls:
        """What requests to it may ask of their sampling."""
        grammars = None
        if self.tokenizer_json is not None:
            size = self.model.description.vocab_size
            grammars = Grammars(self.tokenizer_json, size, self.eos_token_ids)
        return Controls(grammars, self.eos_token_ids)

    def grammar_bytes(self) -> int:
        """The most that the processes of its grammars take; 0 if it can follow none."""
        if self.tokenizer_json is None:
            return 0
        return process_bytes_for(self.model.description.vocab_size)

    def layers(self) -> tuple[LayerSpec, ...]:
        """Its layers, marked with its name."""
        return tuple(replace(one, model=self.name) for one in self.model.description.layers)


def check_several(models: Sequence[ServedModel], options: EngineOptions, has_draft: bool) -> None:
    """Refuse models and options that cannot share an engine with another model.

    :raises ChangeSomething: for two models of one name, a draft model, images, budgets of
        prompts, or protected prefixes beside a second model.
    """
    if len(models) == 1:
        return
    names = [one.name for one in models]
    for name in names:
        if not name or names.count(name) > 1:
            problem = "is the name of two models" if name else "names no model"
            raise ChangeSomething("model", name or "''", problem, "name each: --model NAME=PATH")
    if has_draft:
        raise _refusal("--speculative-model", "given", "proposes draft tokens for one model only")
    if options.common_pool:
        raise _refusal("common_pool", True, "protects the prefixes of one model only")
    for one in models:
        for layer in one.model.description.layers:
            if layer.kind in UNSERVED:
                raise _refusal("model", one.name, f"{UNSERVED[layer.kind]}, which is served alone")


def _refusal(field_name: str, value: object, problem: str) -> ChangeSomething:
    return ChangeSomething(field_name, value, problem, "leave it out, or give one --model only")
