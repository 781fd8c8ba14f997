"""Checks of a draft model and of the options of speculation."""

from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import IMAGE_KINDS
from kvell.models.families.draft_model import FLAG, check_vocabularies
from kvell.models.paged_model import PagedModel


def check_speculation(model: PagedModel, draft: PagedModel | None, options: EngineOptions) -> None:
    """Refuse options with which speculation cannot work.

    :raises ChangeSomething: for a draft model with another vocabulary, one that takes images or has
        no head, or one without a number of draft tokens; or for contradictory look-up lengths.
    """
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
    if draft is None:
        return
    name = draft.description.architecture
    if not options.num_speculative_tokens:
        problem = "proposes nothing without a number of draft tokens"
        raise ChangeSomething(FLAG, name, problem, "use --num-speculative-tokens 4")
    check_vocabularies(model.description.vocab_size, draft.description.vocab_size, name)
    if not draft.has_head:
        problem = "has no lm_head.weight to draft tokens with, and tie_word_embeddings is false"
        raise ChangeSomething(FLAG, name, problem, "use a model that writes text")
    if {layer.kind for layer in draft.description.layers} & IMAGE_KINDS:
        problem = "takes images, which no draft model is given"
        raise ChangeSomething(FLAG, name, problem, "use a text model of its vocabulary")
