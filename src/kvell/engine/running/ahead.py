"""Running of steps on a separate thread, in order.

::

    steps   … run 1 ┐ ready 2 ┌ run 2 ────────────
                    │         ├ result 1
    loop            ┘ waits   └ commit 1 ─ plan 3 ─

Two threads share Python's lock, which a compiled pass releases.  A thread that waits for step 1
would wake at its end, and take the lock just when step 2 needs it to begin.  So a result is
delivered only once the next step computes, some tenths of a millisecond later.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import PreparingRunner, Runner

Run = Callable[[Callable[[], StepResult]], StepResult]


class StepsAhead:
    """A thread that runs steps in order; :meth:`ask` is called from one other thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-steps")
        self._asked = self._started = 0
        self._kept: tuple[Future[StepResult], StepResult] | None = None

    def ask(self, run: Callable[[], StepResult]) -> Future[StepResult]:
        """Run a step after all earlier ones; the future has its result or its exception."""
        answer: Future[StepResult] = Future()
        self._asked += 1
        self._thread.submit(self._answer, run, answer)
        return answer

    def start(self, runner: Runner, plan: StepPlan, run: Run) -> Callable[[], StepResult]:
        """Prepare a step, and let it run after all earlier ones; return what waits for its result.

        :param run: runs the function that computes the step.
        """
        if isinstance(runner, PreparingRunner):
            return self.ask(partial(run, runner.prepare(plan, self.begun))).result
        return self.ask(partial(run, partial(runner.run, plan))).result

    def begun(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            answer, result = kept
            answer.set_result(result)

    def settle(self) -> None:
        self._thread.submit(self._forget).result()

    def close(self) -> None:
        """Wait until all steps have run, and end the thread."""
        self._thread.shutdown()

    def _forget(self) -> None:
        self._asked = self._started
        self._kept = None

    def _answer(self, run: Callable[[], StepResult], answer: Future[StepResult]) -> None:
        self._started += 1
        try:
            result = run()
        except BaseException as failure:
            self.begun()
            answer.set_exception(failure)
            return
        self.begun()  # the step may have computed nothing
        self._kept = answer, result
        if self._started == self._asked:
            self.begun()
