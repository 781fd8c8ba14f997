"""Cache root of a request at the instance that it moves to."""

from kvell.engine.requests.cache_roots import RESERVED, is_long_root, long_root
from kvell.mempool.rendezvous import PdCaching


def handed_over_root(root: str, pd_caching: PdCaching, unique: str) -> str:
    """Return the cache root of a request at the instance that it moves to.

    :param root: the cache root at the instance that computes its prompt.
    :param unique: a name of the request that is unique among all instances.
    """
    if pd_caching >= 2:
        return root
    unshared = f"{RESERVED}moved {unique}"
    return long_root(unshared) if is_long_root(root) else unshared
