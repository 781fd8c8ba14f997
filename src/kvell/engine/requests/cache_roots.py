"""Roots of the prefix cache: requests under different roots never share pages."""

RESERVED = "\0"
"""Prefix of the roots that no salt maps to."""

DROPPING_ROOT = RESERVED + "dropping"
"""The root of requests that keep only a part of their prompt: nothing is ever cached under it."""

_SCORED, _OWN = RESERVED + "scored ", RESERVED + "own "
"""Prefixes of the roots of one request each."""

LONG = RESERVED + "long "
"""Prefix of the roots of texts under the long rotation table."""


def cache_root(salt: str, unique: str, *, is_scored: bool, is_cached: bool = True) -> str:
    """Return the root of a request.

    :param unique: a name that no other request of the instance has, ended ones included.
    :param is_cached: False if no other request may ever hit its pages.

    A request whose prompt is scored has its own root, since all of its prompt must be computed.
    After a preemption it may hit its own pages, whose tokens were scored then.
    """
    if is_scored:
        return _SCORED + unique
    if not is_cached:
        return _OWN + unique
    return RESERVED + salt if salt.startswith(RESERVED) else salt


def is_unique_root(root: str) -> bool:
    """Return whether only one request has the root, so that its pages are useless once it ends."""
    return root.removeprefix(LONG).startswith((_SCORED, _OWN))


def long_root(root: str) -> str:
    """Return the root of a text that has outgrown the short rotation table.

    Its keys differ from those of the same tokens under the short table, whose root is ``root``.
    """
    return LONG + root


def kept_root(unique: str) -> str:
    """Return the root of a request whose first tokens are remote from the start.

    The index has no page under this root, so the request holds none of those tokens here.

    :param unique: a name that no other start of any request of the instance has.
    """
    return f"{RESERVED}kept {unique}"
