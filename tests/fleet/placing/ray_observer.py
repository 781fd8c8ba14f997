"""Sees and changes a Ray cluster from a process of its own: Ray's threads stay out of the tests.

Lines on stdin are orders, and each is answered by a line of JSON.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class RayObserver:
    """The observer's process, as a test sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def groups(self) -> dict[str, str]:
        states: dict[str, str] = self._ask("groups")
        return states

    def actors(self) -> list[str]:
        names: list[str] = self._ask("actors")
        return names

    def hold(self) -> None:
        self._ask("hold")

    def release(self) -> None:
        self._ask("release")

    def _ask(self, order: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def observed(address: str, environ: Mapping[str, str]) -> Iterator[RayObserver]:
    command = [sys.executable, "-m", "tests.fleet.placing.ray_observer", address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as process:
        yield RayObserver(process)
        assert process.stdin is not None
        process.stdin.close()


def main(address: str) -> None:
    import ray
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    ray.init(address, namespace="test", logging_level="CRITICAL", log_to_driver=False)
    held = None
    for order in sys.stdin:
        answer: Any = None
        if order == "groups\n":
            table = placement_group_table().values()
            answer = {one["name"]: one["state"] for one in table if one["state"] != "REMOVED"}
        elif order == "actors\n":
            answer = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
        elif order == "hold\n":
            held = placement_group([{"CPU": 1.0}], name="held")
            answer = held.wait(60)
        else:
            remove_placement_group(held)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
