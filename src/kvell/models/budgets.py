"""Token dropping: full attention that keeps a budget of a prompt's tokens, layer by layer.

A choice of whoever serves, not of the model's config.
Source: PyramidKV §4.1 (budgets fall in an arithmetic sequence from the bottom layer up).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, LayerSpec

DEFAULT_DEPTH = 20
"""How steep the pyramid is: its top keeps about the mean over this."""


def pyramid_budgets(
    num_layers: int, mean_budget_tokens: int, *, recent_tokens: int = 0, depth: int = DEFAULT_DEPTH
) -> tuple[int, ...]:
    """Tokens that each layer keeps, the bottom one first and most.

    The top layer chooses mean ÷ depth tokens, the bottom one 2 × mean − top, the others
    lie evenly between; ``recent_tokens`` are kept in each beside the chosen ones.

    :raises ChangeSomething: if the mean is no more than the recent tokens.
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
    drop, steps = 2 * (chosen - top), max(1, num_layers - 1)
    return tuple(
        recent_tokens + top + (drop * (num_layers - 1 - i) + steps // 2) // steps
        for i in range(num_layers)
    )


def with_budgets(
    layers: Sequence[LayerSpec], budgets_tokens: Mapping[int, int]
) -> tuple[LayerSpec, ...]:
    """The same layers, those of the given indices dropping all but a budget of the prompt.

    :raises ChangeSomething: if an index is no layer of full attention that stores its own
        tokens, or a budget is not positive.
    """
    full = {layer.index for layer in layers if _is_plain(layer)}
    for index, tokens in budgets_tokens.items():
        _require(index in full, index, "is no layer of full attention with tokens of its own")
        _require(tokens > 0, index, f"cannot keep {tokens} tokens")
    return tuple(
        replace(layer, kind=GroupKind.DROPPING, window_tokens=budgets_tokens[layer.index])
        if _is_plain(layer) and layer.index in budgets_tokens
        else layer
        for layer in layers
    )


def _is_plain(layer: LayerSpec) -> bool:
    return layer.kind is GroupKind.FULL and layer.kv_of is None


def _require(holds: bool, index: int, problem: str) -> None:
    if not holds:
        remedy = "give positive budgets to layers of full attention"
        raise ChangeSomething("budgets_tokens", f"layer {index}", problem, remedy)
