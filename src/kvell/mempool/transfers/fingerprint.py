"""The fingerprint of a layout, which two instances must share to exchange pages."""

import hashlib
import json
from collections.abc import Sequence

from kvell.memory import GroupSpec


def layout_fingerprint(groups: Sequence[GroupSpec], content: str) -> str:
    """Return a digest of the format of pages; instances with equal digests may exchange pages.

    The digest is independent of the size of the pool and the number of pages in a large page.

    :param content: what else decides the bytes of a page: weights, element types.
    """
    fields = [
        [
            group.name,
            group.kind.value,
            list(group.layers),
            group.layer_token_bytes,
            group.page_tokens,
            group.page_stride_bytes,
            group.window_tokens,
            group.layers_per_page,
            group.model,
        ]
        for group in groups
    ]
    return hashlib.blake2b(json.dumps([fields, content]).encode(), digest_size=16).hexdigest()
