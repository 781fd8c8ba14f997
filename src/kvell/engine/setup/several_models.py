"""Several independent models in one engine: their differences, and unsupported combinations.

They share the pool, the scheduler and every step's budget.  A request names its model and
holds only pages of that model's groups, so memory is divided by load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvell.engine.sampling.controls import Controls
from kvell.engine.sampling.grammars import Grammars, process_bytes_for
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import IMAGE_KINDS, GroupKind, LayerSpec
from kvell.models.images.image_store import ImageStore
from kvell.models.paged_model import PagedModel


@dataclass(frozen=True)
class ServedModel:
    """A model and its name in requests.

    :param name: "" if the engine has only one model.
    """

    name: str
    model: PagedModel
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    tokenizer_json: Callable[[], str] | None = None

    def controls(self) -> Controls:
        grammars = None
        if self.tokenizer_json is not None:
            size = self.model.description.vocab_size
            grammars = Grammars(self.tokenizer_json, size, self.eos_token_ids)
        return Controls(grammars, self.eos_token_ids)

    def grammar_bytes(self) -> int:
        """Return the most memory of its grammar processes; 0 if it supports no grammar."""
        if self.tokenizer_json is None:
            return 0
        return process_bytes_for(self.model.description.vocab_size)

    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(replace(layer, model=self.name) for layer in self.model.description.layers)


def check_several(models: Sequence[ServedModel], options: EngineOptions) -> None:
    """Refuse models and options that cannot share an engine with another model.

    :raises ChangeSomething: for two models of one name or two that take images, or for a second
        model with KV budgets or protected prefixes.
    """
    if len(models) == 1:
        return
    names = [served.name for served in models]
    for name in names:
        if not name or names.count(name) > 1:
            problem = "is the name of two models" if name else "names no model"
            raise ChangeSomething("model", name or "''", problem, "name each: --model NAME=PATH")
    if options.common_pool:
        raise _refusal("common_pool", True, "protects the prefixes of one model only")
    kinds = {served.name: {layer.kind for layer in served.layers()} for served in models}
    for name in names:
        if GroupKind.DROPPING in kinds[name]:
            problem = "keeps a budget of a prompt's tokens, which is served alone"
            raise _refusal("model", name, problem)
    with_images = [name for name in names if kinds[name] & IMAGE_KINDS]
    if len(with_images) > 1:
        problem = f"takes images, and so does {with_images[0]}"
        raise ChangeSomething("model", with_images[1], problem, "give one such model only")


def _refusal(field_name: str, value: object, problem: str) -> ChangeSomething:
    return ChangeSomething(field_name, value, problem, "leave it out, or give one --model only")


def with_draft(served: Sequence[ServedModel], draft: PagedModel | None) -> list[PagedModel]:
    return [*(member.model for member in served), *([] if draft is None else [draft])]


def images_of(served: Sequence[ServedModel]) -> ImageStore | None:
    """Return the images of the one model that takes images, or None."""
    stores = (member.model.images for member in served)
    return next((store for store in stores if store is not None), None)
