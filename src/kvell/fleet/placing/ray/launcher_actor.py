"""A launcher as an actor of Ray, on the machine of its instance."""

import os
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import ray

from kvell.fleet.placing.launcher import Launcher
from kvell.fleet.placing.ray.machines import processors_here
from kvell.fleet.placing.ray.room import threads

STARTS = 4
"""Concurrent calls of ``start`` of an actor: each waits until its instance listens."""
QUESTIONS = 2
"""Other concurrent calls of an actor, in threads of their own: none waits for a start."""
LauncherHandle = Any
"""Ray's handle of a :class:`LauncherActor`; its methods have ``remote``."""


class LauncherActor:
    """A :class:`.Launcher` as an actor of Ray; one for each instance.

    :param sharing: instances that this machine may have.
    """

    def __init__(self, secret: bytes, sharing: int) -> None:
        count = threads(processors_here(), len(os.sched_getaffinity(0)), sharing)
        self._launcher = Launcher(secret, str(ray.util.get_node_ip_address()), count)

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def start(self, words: Sequence[str], incarnation: int) -> tuple[str, int, str]:
        """Start an incarnation; return the fields of :class:`.InstancePlace`.

        Ray calls this again after a restart of the actor, so it may be called twice.
        """
        return astuple(self._launcher.start(words, incarnation))

    @ray.method(concurrency_group="questions")  # type: ignore[untyped-decorator]
    def runs(self) -> tuple[int, tuple[str, int, str]] | None:
        listening = self._launcher.runs()
        return None if listening is None else (listening[0], astuple(listening[1]))

    @ray.method(concurrency_group="questions")  # type: ignore[untyped-decorator]
    def end_of(self, incarnation: int) -> tuple[int, str] | None:
        ended = self._launcher.end_of(incarnation)
        return None if ended is None else (ended.exit_code, ended.last_words)

    @ray.method(concurrency_group="questions")  # type: ignore[untyped-decorator]
    def stop(self, incarnation: int) -> None:
        self._launcher.stop(incarnation)


def launcher_kind() -> Any:
    groups = {"questions": QUESTIONS}
    return ray.remote(concurrency_groups=groups, max_concurrency=STARTS)(LauncherActor)
