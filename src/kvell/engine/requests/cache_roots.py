"""Roots of the prefix cache: requests under different roots never share pages."""

RESERVED = "\0"
"""Begins the roots that no salt maps to."""

DROPPING_ROOT = RESERVED + "dropping"
"""The root of requests that keep only a part of their prompt: nothing is ever cached under it."""


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


def kept_root(unique: str) -> str:
    """Return the root of a request whose first tokens lie elsewhere from the start.

    The index has no page of it before, so that the request holds none of those tokens here.

    :param unique: names this start of this request and no other of the instance.
    """
    return f"{RESERVED}kept {unique}"
