"""Processes that compile grammars."""

import os
from pathlib import Path

from kvell.engine.sampling.grammars import Grammars


def children(pid: int | None = None) -> set[int]:
    tasks = Path(f"/proc/{pid or os.getpid()}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def workers_of(grammars: Grammars) -> set[int]:
    template = grammars.processes.template
    return set() if template is None else children(template.pid)
