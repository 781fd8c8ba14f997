"""``kvell replay`` in this process: flags in, the report that the command prints as JSON out."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from kvell.cli.replay.command import replay
from kvell.cli.terminal.environment import process_cache_dir
from kvell.cli.terminal.session import Session
from kvell.errors import ChangeSomething


def replayed(*words: object) -> dict[str, Any]:
    """Run ``kvell replay`` with these words; return its report.

    :returns: ``{"refused": message}`` where the command asks its user for a change, such as memory
        that holds no request.
    """
    out, session = io.StringIO(), Session(cache_dir=process_cache_dir())
    flags = [*map(str, words), "--json"]
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            replay.main(flags, "kvell replay", standalone_mode=False, obj=session)
    except ChangeSomething as error:
        return {"refused": str(error)}
    report: dict[str, Any] = json.loads(out.getvalue())
    return report
