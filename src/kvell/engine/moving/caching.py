"""Where a request's prefix is cached at the instance that goes on with it."""

from kvell.engine.requests.cache_roots import RESERVED, is_long_root, long_root
from kvell.mempool.rendezvous import PdCaching


def handed_over_root(root: str, pd_caching: PdCaching, unique: str) -> str:
    """Return the cache root of a request at the instance that goes on with it.

    :param root: where its prompt is computed.
    :param unique: names the request among all instances.
    """
    if pd_caching >= 2:
        return root
    own = f"{RESERVED}moved {unique}"
    return long_root(own) if is_long_root(root) else own
