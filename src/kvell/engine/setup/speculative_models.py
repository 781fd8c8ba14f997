"""Checks of a draft model and of the options of speculation."""

from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind
from kvell.models.families.draft_model import FLAG, check_vocabularies
from kvell.models.paged_model import PagedModel

IMAGE_KINDS = frozenset({GroupKind.CROSS, GroupKind.VISION})


def check_speculation(model: PagedModel, draft: PagedModel | None, options: EngineOptions) -> None:
    """Refuse options with which speculation cannot work.

    :raises ChangeSomething: for a draft model with another vocabulary, with images, or without a
        number of draft tokens; or for contradictory look-up lengths.
    """
    _check_counts(options)
    if draft is None:
        return
    if not options.num_speculative_tokens:
        problem = "proposes nothing without a number of draft tokens"
        raise ChangeSomething(FLAG, _name(draft), problem, "use --num-speculative-tokens 4")
    check_vocabularies(model.description.vocab_size, draft.description.vocab_size, _name(draft))
    kinds = {layer.kind for paged in (model, draft) for layer in paged.description.layers}
    if kinds & IMAGE_KINDS:
        problem = "cannot propose draft tokens where a model reads images"
        remedy = "leave it out: draft tokens are looked up"
        raise ChangeSomething(FLAG, _name(draft), problem, remedy)


def _check_counts(options: EngineOptions) -> None:
    if options.num_speculative_tokens < 0:
        raise ChangeSomething(
            "--num-speculative-tokens",
            options.num_speculative_tokens,
            "is below 0",
            "use 0 for no draft tokens",
        )
    shortest, longest = options.prompt_lookup_min, options.prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise ChangeSomething(
            "--prompt-lookup-min",
            shortest,
            f"is not between 1 and --prompt-lookup-max={longest}",
            f"use at most {max(1, longest)}",
        )


def _name(model: PagedModel) -> str:
    return model.description.architecture
