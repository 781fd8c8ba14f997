"""Messages about paths and methods that are not served, with the nearest path."""

from collections.abc import Collection, Iterable

from kvell.equivalents.nearest import nearest

LONGEST_PATH = 200
AT_THE_START = "models are given when the server starts: kvell serve MODEL [MODEL …]"
"""The remedy for requests that would change which models are served."""
MANAGED = frozenset(f"/api/{name}" for name in ("copy", "create", "delete", "push"))
"""Paths of Ollama that manage models."""
BLOBS = "/api/blobs/"
"""The prefix of Ollama's paths for files of models."""
LEAST_PARTS = 2
"""The parts that a path and a served path must share at their ends to be near."""


def unknown_path(path: str, served: Iterable[str], shown_at: Collection[str]) -> str:
    """Return a message about a path that is not served.

    :param served: paths that are served, without those that have parameters.
    :param shown_at: paths that list what is served.
    """
    if path.rstrip("/") in MANAGED or path.startswith(BLOBS):
        return f"path={path[:LONGEST_PATH]}: is not served; {AT_THE_START}"
    near = nearest_path(path[:LONGEST_PATH], served)
    remedy = f"see {' or '.join(shown_at)} for what is" if near is None else f"use {near}"
    return f"path={path[:LONGEST_PATH]}: is not served; {remedy}"


def nearest_path(path: str, served: Iterable[str]) -> str | None:
    """Return the served path that a client probably means; None if no path is near.

    A path is near if one of both ends with the other, as ``/chat/completions`` and
    ``/v1/v1/chat/completions`` do, or if they differ in few characters: parts with which both begin
    do not count, so that ``/api/push`` is not near to ``/api/ps``.
    """
    parts = _parts(path)
    paths = sorted(served)
    ends = [each for each in paths if _shares_end(parts, _parts(each))]
    if ends:
        return max(ends, key=lambda each: len(_parts(each)))
    near = [each for each in paths if _differ_little(parts, _parts(each))]
    return next(iter(nearest(path.lower(), near, 0.0)), None)


def wrong_method(method: str, path: str, allowed: str) -> str:
    """Return a message about a method that a path does not take.

    :param allowed: the methods that it takes.
    """
    return f"method={method}: is not taken by {path[:LONGEST_PATH]}; use {allowed}"


def _parts(path: str) -> list[str]:
    return [part for part in path.lower().split("/") if part]


def _shares_end(parts: list[str], served: list[str]) -> bool:
    shared = min(len(parts), len(served))
    is_end = parts[len(parts) - shared :] == served[len(served) - shared :]
    return is_end and shared >= max(1, min(LEAST_PARTS, len(served)))


def _differ_little(parts: list[str], served: list[str]) -> bool:
    same = 0
    while same < min(len(parts), len(served)) and parts[same] == served[same]:
        same += 1
    rest = "/".join(served[same:])
    return bool(rest and nearest("/".join(parts[same:]), [rest]))
