"""Processes that compile grammars."""

import os
from pathlib import Path

from kvell.engine.sampling.grammars import Grammars
from tests.engine.sampling.seen import template_of


def children(pid: int | None = None) -> set[int]:
    tasks = Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def workers_of(grammars: Grammars) -> set[int]:
    template = template_of(grammars)
    return set() if template is None else children(template.pid)
