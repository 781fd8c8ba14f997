"""Directories that are made once from a source, and again when it has changed.

::

    absent ──make──► NAME.partial-PID ──rename──► NAME ──fingerprint differs──► replaced

A directory is valid only if its marker holds the source's fingerprint; the marker is the last file
written, before the rename. Several processes may make the same one: the first to finish wins.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvell.wire.decoding import MalformedError, decode_json

MARKER = "kvell-source.json"


def made_once(target: Path, fingerprint: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Return a directory with a fingerprint; make it if needed.

    :param make: writes its files into a new directory, which it may have to create.
    """
    if is_complete(target, fingerprint):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make(partial)
        (partial / MARKER).write_text(json.dumps(fingerprint))
        _put_in_place(partial, target, fingerprint)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def is_complete(directory: Path, fingerprint: dict[str, Any]) -> bool:
    try:
        return bool(decode_json((directory / MARKER).read_bytes()) == fingerprint)
    except (OSError, MalformedError):
        return False


def _put_in_place(partial: Path, target: Path, fingerprint: dict[str, Any]) -> None:
    """Rename, unless another process finished first.

    A directory cannot be replaced in one step, so an invalid one is moved away first.
    """
    if is_complete(target, fingerprint):
        return
    stale = target.with_name(f"{target.name}.stale-{os.getpid()}")
    try:
        if target.exists():
            target.rename(stale)
        partial.rename(target)
    except OSError:
        if not is_complete(target, fingerprint):
            raise
    finally:
        shutil.rmtree(stale, ignore_errors=True)
