"""Requirements of a KV budget (``--kv-budget``) on other options."""

from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import (
    GroupKind,
)
from kvell.models.config.budgets import OBSERVED_TOKENS
from kvell.models.paged_model import PagedModel
from kvell.pages.sizing import GROUPED

FLAG = "--kv-budget"


def observing_tokens(model: PagedModel, options: EngineOptions) -> int:
    """Return the tokens at a prompt's end that one step must compute; 0 if no layer drops tokens.

    :raises ChangeSomething: with a manager that keeps every token, with images, or if a step may
        not have this number of tokens.
    """
    budgets = [x.window_tokens for x in model.description.layers if x.kind is GroupKind.DROPPING]
    if not budgets:
        return 0
    least = min(budgets)
    if options.manager not in {*GROUPED, "max-page"}:
        problem = f"has no effect with --manager={options.manager}, which keeps every token"
        raise ChangeSomething(FLAG, least, problem, "leave it out, or use --manager kvell")
    if model.images is not None:
        raise ChangeSomething(
            FLAG, least, "is not exact with images", "leave it out, or use a text model"
        )
    if options.max_num_batched_tokens < OBSERVED_TOKENS:
        raise ChangeSomething(
            "--max-num-batched-tokens",
            options.max_num_batched_tokens,
            f"is below the {OBSERVED_TOKENS} tokens that choose what {FLAG} keeps",
            f"use at least {OBSERVED_TOKENS}",
        )
    return OBSERVED_TOKENS
