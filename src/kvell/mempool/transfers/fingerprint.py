"""What two instances must have in common before pages of one mean anything to the other."""

import hashlib
import json
from collections.abc import Sequence

from kvell.memory import GroupSpec


def layout_fingerprint(groups: Sequence[GroupSpec], content: str) -> str:
    """A digest of what pages hold; equal ones may exchange pages.

    The size of the pool is not in it, nor is how many pages a large page has.

    :param content: what else decides the bytes of a page: weights, element types.
    """
    told = [
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
    return hashlib.blake2b(json.dumps([told, content]).encode(), digest_size=16).hexdigest()
