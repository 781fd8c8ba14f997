"""The audit of the CPU buffer's books."""

from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.page_buffer import NO_GROUP, PageBuffer


def audit_buffer(buffer: CpuBuffer) -> list[str]:
    problems = []
    if buffer.held_chunks > buffer.physical_chunks:
        problems.append(f"{buffer.held_chunks} chunks held of {buffer.physical_chunks}")
    if buffer.physical_chunks and not 1 <= buffer.logical_chunks <= buffer.physical_chunks:
        problems.append(f"a logical size of {buffer.logical_chunks} chunks")
    problems.extend(f"holder {h} holds {n} chunks" for h, n in buffer.held.items() if n <= 0)
    return problems


def audit_pages(buffer: PageBuffer) -> list[str]:
    owned = [*buffer.held.values(), *buffer.left.values()]
    taken = [*buffer.draining, *(page for some in owned for page in some)]
    wrong = ["a page has two holders"] * (len(set(taken)) != len(taken))
    wrong += [
        f"holder {holder}: is read by {count}, and holds nothing"
        for holder, count in buffer.readers.items()
        if count < 1 or not (holder in buffer.held or holder in buffer.left)
    ]
    wrong += [
        f"holder {h}: pages are kept for no reader"
        for h in buffer.left.keys() - buffer.readers.keys()
    ]
    for large, index in enumerate(buffer.group_of):
        if (index == NO_GROUP) != (large in buffer.empty_large):
            wrong.append(f"large page {large}: in group {index}, and in the list of empty ones?")
    for index, group in enumerate(buffer.groups):
        count = group.pages_per_large
        ours = [large for large, owner in enumerate(buffer.group_of) if owner == index]
        free = {page for pages in buffer.free[index].values() for page in pages}
        used = {page for g, page in taken if g == index}
        whole = {page for large in ours for page in range(large * count, (large + 1) * count)}
        if free & used or free | used != whole:
            wrong.append(f"group {index}: a page is both free and held, or neither")
        if any(not used & set(range(n * count, (n + 1) * count)) for n in ours):
            wrong.append(f"group {index}: holds a large page and no page in it")
    return wrong
