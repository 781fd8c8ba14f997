"""Runs the checks of one client and tells how each ended, as a line of JSON."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Check = Callable[[], Any]
BASE_URL, MODEL, MODEL_DIRECTORY = sys.argv[1:4]
"""Where the server is, with ``/v1``; what it serves; and the directory of that model's files."""


def run(**checks: Check) -> None:
    """Run each; one that raises has failed."""
    for name, check in checks.items():
        try:
            check()
            ok, why = True, ""
        except Exception as error:
            ok, why = False, f"{type(error).__name__}: {error}"[:400]
        tell(name, ok, why)


def tell(name: str, ok: bool, why: str = "") -> None:
    """Write the line of one check."""
    print(json.dumps({"check": name, "ok": ok, "why": why}), flush=True)


def raises(kind: type[BaseException], call: Callable[[], Any], words: str = "") -> None:
    """Check that a call raises one kind of error, with these words in it."""
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def awaited(call: Callable[[], Awaitable[Any]]) -> Check:
    """Make a check of a coroutine."""
    import asyncio

    async def run_it() -> Any:
        return await call()

    return lambda: asyncio.run(run_it())
