"""Token dropping: full attention that keeps a budget of a prompt's tokens, layer by layer.

The operator chooses it; the model's config does not.
Source: PyramidKV §4.1 (budgets fall in an arithmetic sequence from the bottom layer up).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, LayerSpec

DEFAULT_DEPTH = 20
"""Steepness of the pyramid: the top layer chooses about mean ÷ depth tokens."""
OBSERVED_TOKENS = 8
"""Tokens at the end of a prompt that vote for the earlier ones; they always stay."""
_BUDGET = re.compile(r"(?P<pyramid>pyramid:)?(?P<tokens>\d{1,9})")


def pyramid_budgets(
    num_layers: int, mean_budget_tokens: int, *, recent_tokens: int = 0, depth: int = DEFAULT_DEPTH
) -> tuple[int, ...]:
    """Return the tokens kept by each layer, bottom layer first; the bottom layer keeps most.

    The top layer chooses mean ÷ depth tokens, the bottom one 2 × mean − top, and the others are
    evenly spaced between. Each layer keeps ``recent_tokens`` besides the chosen ones.

    :raises ChangeSomething: if the mean does not exceed the recent tokens.
    """
    chosen = mean_budget_tokens - recent_tokens
    if num_layers < 1 or depth < 1 or chosen < 1:
        raise ChangeSomething(
            "mean_budget_tokens",
            mean_budget_tokens,
            f"leaves no token to choose in {num_layers} layers",
            f"use at least {recent_tokens + 1}",
        )
    # A single layer has no slope: it keeps the mean.
    top = max(1, chosen // depth) if num_layers > 1 else chosen
    drop = 2 * (chosen - top)
    steps = max(1, num_layers - 1)
    return tuple(
        recent_tokens + top + (drop * (num_layers - 1 - i) + steps // 2) // steps
        for i in range(num_layers)
    )


def budgets_of(layers: Sequence[LayerSpec], budget: str) -> dict[int, int]:
    """Return the tokens kept by each full-attention layer, by layer index.

    :param budget: ``512``: 512 tokens in each layer; ``pyramid:512``: 512 on average.
    :raises ChangeSomething: naming ``--kv-budget``: if it is malformed, keeps no token besides the
        ``OBSERVED_TOKENS``, or the model has no such layer.
    """
    full = [layer.index for layer in layers if _is_plain(layer)]
    match = _BUDGET.fullmatch(budget)
    if match is None:
        raise _refusal(budget, "is not a budget", "write it like 1024 or pyramid:1024")
    tokens = int(match["tokens"])
    if tokens <= OBSERVED_TOKENS:
        problem = f"keeps no token besides the last {OBSERVED_TOKENS}, which always stay"
        raise _refusal(budget, problem, f"use at least {OBSERVED_TOKENS + 1}")
    if not full:
        problem = "the model has no layers of full attention to drop tokens from"
        raise _refusal(budget, problem, "leave it out")
    if not match["pyramid"]:
        return dict.fromkeys(full, tokens)
    kept = pyramid_budgets(len(full), tokens, recent_tokens=OBSERVED_TOKENS)
    return dict(zip(full, kept, strict=True))


def with_budgets(
    layers: Sequence[LayerSpec], budgets_tokens: Mapping[int, int]
) -> tuple[LayerSpec, ...]:
    """Return the layers, with those at the given indices keeping only a budget of the prompt.

    :raises ChangeSomething: if an index is not a full-attention layer that stores its own
        tokens, or a budget is not positive.
    """
    full = {layer.index for layer in layers if _is_plain(layer)}
    for index, tokens in budgets_tokens.items():
        _require(index in full, index, "is not a layer of full attention with tokens of its own")
        _require(tokens > 0, index, f"cannot keep {tokens} tokens")
    return tuple(
        replace(layer, kind=GroupKind.DROPPING, window_tokens=budgets_tokens[layer.index])
        if _is_plain(layer) and layer.index in budgets_tokens
        else layer
        for layer in layers
    )


def _is_plain(layer: LayerSpec) -> bool:
    return layer.kind is GroupKind.FULL and layer.kv_of is None


def _refusal(budget: str, problem: str, remedy: str) -> ChangeSomething:
    return ChangeSomething("--kv-budget", budget, problem, remedy)


def _require(holds: bool, index: int, problem: str) -> None:
    if not holds:
        remedy = "give positive budgets to layers of full attention"
        raise ChangeSomething("budgets_tokens", f"layer {index}", problem, remedy)
