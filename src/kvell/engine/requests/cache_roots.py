"""Roots of the prefix cache: requests under different roots never share pages."""

RESERVED = "\0"
"""Begins the roots that no salt maps to."""

DROPPING_ROOT = RESERVED + "dropping"
"""The root of requests that keep only a part of their prompt: nothing is ever cached under it."""

_LONG = RESERVED + "long "
"""Begins the roots of texts under the long rotation table."""


def cache_root(salt: str, unique: str, *, is_scored: bool, is_cached: bool = True) -> str:
    """Return the root of a request.

    :param unique: names this request and no other of the instance, ended ones included.
    :param is_cached: False if no other request may ever hit what it computes.

    A request whose prompt is scored has one of its own, since all of its prompt must be computed.
    After a preemption it may hit what it computed itself, which was scored then.
    """
    if is_scored:
        return f"{RESERVED}scored {unique}"
    if not is_cached:
        return f"{RESERVED}own {unique}"
    return RESERVED + salt if salt.startswith(RESERVED) else salt


def long_root(root: str) -> str:
    """Return the root of a text that has outgrown the short rotation table.

    Its keys differ from those of the same tokens under the short table, whose root this is.
    """
    return _LONG + root


def is_long_root(root: str) -> bool:
    """Whether keys under a root are rotated by the long table."""
    return root.startswith(_LONG)


def kept_root(unique: str) -> str:
    """Return the root of a request whose first tokens lie elsewhere from the start.

    The index has no page of it before, so that the request holds none of those tokens here.

    :param unique: names this start of this request and no other of the instance.
    """
    return f"{RESERVED}kept {unique}"
