"""What a layout can hold: pages of one request, the longest request, how many at once.

Counts are of an otherwise idle pool, page by page as the allocator hands them
out: a group's pages round up to whole large pages, over all requests together.
"""

from collections.abc import Callable

from kvell.pages.layout import GroupSpec, Layout


def request_pages(group: GroupSpec, tokens: int, chunk_tokens: int = 1) -> int:
    """Pages of ``group`` that one request of ``tokens`` tokens holds at most.

    :param chunk_tokens: tokens computed in one step: 1 while decoding, more while a
        prompt is read.  A window's pages are released only after the step.
    """
    if not group.window_tokens:
        return -(-tokens // group.page_tokens)
    held_tokens = min(tokens, group.window_tokens - 1 + chunk_tokens)
    straddled = 1 if tokens > held_tokens else 0
    return min(-(-held_tokens // group.page_tokens) + straddled, -(-tokens // group.page_tokens))


def request_bytes(layout: Layout, tokens: int, chunk_tokens: int = 1) -> int:
    """Bytes of all pages of one request, padding included."""
    return sum(
        request_pages(group, tokens, chunk_tokens) * group.page_stride_bytes
        for group in layout.groups
    )


def large_pages_needed(layout: Layout, tokens: int, requests: int = 1) -> int:
    """Large pages that ``requests`` decoding requests of ``tokens`` tokens take together."""
    return sum(
        -(-requests * request_pages(group, tokens) // group.pages_per_large)
        for group in layout.groups
    )


def requests_that_fit(layout: Layout, tokens: int) -> int:
    """How many requests of ``tokens`` tokens decode at once; 0 if not even one."""
    highest = layout.num_large_pages * max(group.pages_per_large for group in layout.groups)
    return _largest(
        lambda count: large_pages_needed(layout, tokens, count) <= layout.num_large_pages, highest
    )


def longest_request(layout: Layout, max_model_len: int) -> int:
    """Tokens of the longest request that fits alone, up to what the model was made for."""
    return _largest(
        lambda tokens: large_pages_needed(layout, tokens) <= layout.num_large_pages, max_model_len
    )


def _largest(holds: Callable[[int], bool], highest: int) -> int:
    """The largest number of 0 … ``highest`` that holds, where 0 does and holding is monotonic."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
