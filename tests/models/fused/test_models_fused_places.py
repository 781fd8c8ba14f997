"""Where the threads of a fused pass run: one processor each, if they are as many."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.fused_models import fused_model
from tests.models.harness import PagedRunner, prompt_ids, runner_over, tiny_module
from tests.models.loading.recorder import Recorder

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="threads stay where they are put on Linux"
)


class Places(Recorder):
    """Notes where the thread of a pass that calls back may run, and fails when it is told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.seen: list[frozenset[int]] = []
        self._fails = fails

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        super().before_attend(layer, query)
        self.seen.append(frozenset(os.sched_getaffinity(0)))
        if self._fails:
            raise KeyError("gone")


@pytest.fixture
def processors() -> frozenset[int]:
    """Those that this process may use, two at least."""
    found = frozenset(os.sched_getaffinity(0))
    if len(found) < 2:
        pytest.skip("one processor is nothing to choose from")
    return found


@pytest.fixture
def runner_of() -> Callable[[int], PagedRunner]:
    module = tiny_module("LlamaForCausalLM")
    return lambda threads: runner_over(fused_model(module, num_threads=threads))


def places_of_others() -> list[frozenset[int]]:
    tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return [frozenset(os.sched_getaffinity(task)) for task in tasks - {threading.get_native_id()}]


def test_each_thread_takes_one(
    processors: frozenset[int], runner_of: Callable[[int], PagedRunner]
) -> None:
    runner, places = runner_of(len(processors)), Places()
    runner.callbacks = places
    runner.step([("a", prompt_ids(9))])
    first, *others = sorted(processors)
    assert set(places.seen) == {frozenset({first})}
    assert {frozenset({one}) for one in others} <= set(places_of_others())


@pytest.mark.parametrize("fails", [False, True])
def test_behind_a_pass_its_caller_may_run_where_it_did(
    processors: frozenset[int], runner_of: Callable[[int], PagedRunner], fails: bool
) -> None:
    runner, places = runner_of(len(processors)), Places(fails)
    runner.callbacks = places
    try:
        runner.step([("a", prompt_ids(9))])
    except KeyError:
        assert fails
    assert places.seen
    assert os.sched_getaffinity(0) == processors


@pytest.mark.parametrize("more", [-1, 1])
def test_other_numbers_of_threads_are_left_to_the_system(
    processors: frozenset[int], runner_of: Callable[[int], PagedRunner], more: int
) -> None:
    runner, places = runner_of(len(processors) + more), Places()
    runner.callbacks = places
    runner.step([("a", prompt_ids(9))])
    assert set(places.seen) == {processors}


def test_a_caller_of_fewer_processors_keeps_to_them(
    processors: frozenset[int], runner_of: Callable[[int], PagedRunner]
) -> None:
    runner, places, last = runner_of(1), Places(), frozenset({max(processors)})
    runner.callbacks = places
    os.sched_setaffinity(0, last)
    try:
        runner.step([("a", prompt_ids(9))])
        assert os.sched_getaffinity(0) == last
    finally:
        os.sched_setaffinity(0, processors)
    assert set(places.seen) == {last}


SCRIPT = """
from tests.models.harness import prompt_ids, runner_over, tiny_module
from tests.models.fused_models import fused_model
from tests.models.fused.test_models_fused_places import Places
runner = runner_over(fused_model(tiny_module("LlamaForCausalLM"), num_threads={threads}))
runner.callbacks = Places()
runner.step([("a", prompt_ids(9))])
print(len(runner.callbacks.seen[0]))
"""


def test_places_of_the_user_s_own_are_obeyed(processors: frozenset[int]) -> None:
    """One place of all processors, in which threads may move."""
    place = "{" + ",".join(map(str, sorted(processors))) + "}"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(threads=len(processors))],
        env={**os.environ, "OMP_PLACES": place, "OMP_PROC_BIND": "true"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) == len(processors)
