"""A second model's groups for a live pool: pages that divide its large page.

The large page keeps its size, so the new groups adapt: tokens of a page, layers of a state page and
padding are chosen together. A model that does not fit is refused with the size that would serve
both at the next start (``plan_layout(…, large_page_bytes=…)``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvell.errors import ChangeSomething
from kvell.pages.grouping import Draft, draft, group_by_kind
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec
from kvell.pages.sizing import padded_sizes
from kvell.vocabulary import MIB

PAGE_TOKENS_CHOICES = (16, 8, 32, 24, 48, 64, *range(40, 136, 8), *range(4, 128, 8), 2, 1)
"""Tokens of a page, in order of preference."""
MAX_REGISTERED_PADDING = 0.05
"""Padding of a page that lets a model into a pool made for another."""
REACH = 64
"""Upper limit of a size that serves both, in multiples of the largest page."""


def plan_groups_into(
    large_page_bytes: int,
    layers: Sequence[LayerSpec],
    page_tokens_choices: Sequence[int] = PAGE_TOKENS_CHOICES,
    *,
    beside: Sequence[GroupSpec] = (),
) -> tuple[GroupSpec, ...]:
    """Return groups of ``layers`` whose pages divide ``large_page_bytes`` exactly.

    Each group takes the first of the choices that leaves at most 5 % of padding on top of a page.
    States try pages of many layers first, as long as they are no larger than a page of tokens.
    Names carry the layers' ``model``.

    :param page_tokens_choices: tokens of a page, in order of preference.
    :param beside: groups that the pool has, for the size named in a refusal.
    :raises ChangeSomething: if a group fits with none of them; the remedy names a size that all
        fit: at most 1 % of padding in any page, or, if ``beside`` is empty, a multiple of this one
        (which all divisors of this one divide too).
    """
    storing = [layer for layer in layers if layer.kv_of is None]
    if not storing:
        raise ChangeSomething("model", "no layers", "stores no KV cache", "use a decoder model")
    drafts = group_by_kind(storing, page_tokens_choices[0])
    fitted = [_fitted(group, large_page_bytes, page_tokens_choices) for group in drafts]
    misfits = [group.name for group, fit in zip(drafts, fitted, strict=True) if fit is None]
    if misfits:
        size = _serving_both(large_page_bytes, drafts, beside, page_tokens_choices)
        raise _refusal(large_page_bytes, misfits, size)
    return tuple(group for group in fitted if group is not None)


def padding_of(group: GroupSpec) -> float:
    """Return the padding of a page as a fraction of its data."""
    return group.padding_bytes / group.page_bytes


def _fitted(
    group: GroupSpec, large_page_bytes: int, page_tokens_choices: Sequence[int]
) -> GroupSpec | None:
    """Return the group with the first page that fits; None if there is none."""
    for candidate in _candidates(group, page_tokens_choices):
        if candidate.page_bytes <= large_page_bytes:
            fit = candidate.fit(large_page_bytes)
            if padding_of(fit) <= MAX_REGISTERED_PADDING:
                return fit
    return None


def _candidates(group: GroupSpec, page_tokens_choices: Sequence[int]) -> Iterator[Draft]:
    if group.kind is not GroupKind.STATE:
        yield from (draft(replace(group, page_tokens=tokens)) for tokens in page_tokens_choices)
        return
    count = len(group.layers)
    first = group.layers_per_page
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    smaller = [n for n in reversed(divisors) if n <= first]
    for layers in (*smaller, *(n for n in divisors if n > first)):
        yield draft(replace(group, layers_per_page=layers))


def _serving_both(
    large_page_bytes: int,
    groups: Sequence[GroupSpec],
    beside: Sequence[GroupSpec],
    page_tokens_choices: Sequence[int],
) -> int:
    """Return a size that the new groups fit, and those of the pool too; 0 if none is in reach."""
    pages = [draft(group).page_bytes for group in (*groups, *beside)]
    if beside:
        sizes = padded_sizes(pages, REACH * max(large_page_bytes, *pages))
        return next((n for n in sizes if _all_fit(groups, n, page_tokens_choices)), 0)
    first = max(2, -(-max(pages) // large_page_bytes))
    multiples = (large_page_bytes * count for count in range(first, first + REACH))
    return next((n for n in multiples if _all_fit(groups, n, page_tokens_choices)), 0)


def _all_fit(
    groups: Sequence[GroupSpec], large_page_bytes: int, page_tokens_choices: Sequence[int]
) -> bool:
    return all(_fitted(group, large_page_bytes, page_tokens_choices) for group in groups)


def _refusal(large_page_bytes: int, misfits: Sequence[str], size: int) -> ChangeSomething:
    remedy = (
        f"start with a large page of {size} bytes ({size / MIB:.1f} MiB), which serves both"
        if size
        else "give this model a pool of its own"
    )
    return ChangeSomething(
        "large_page_bytes",
        large_page_bytes,
        f"is not divided by pages of {', '.join(misfits)} with at most "
        f"{MAX_REGISTERED_PADDING:.0%} of padding",
        remedy,
    )
