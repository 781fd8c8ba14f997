"""Questions about the pages of instances, answered in order and in bounded time."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvell.engine.protocol.messages import Command
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.errors import InstanceDied, TryLater

Question = AskPages | AskLargePage
Answer = Pages | LargePage

MOST_QUESTIONS = 16
"""Most unanswered questions to one instance."""


@dataclass(frozen=True)
class _Asked:
    question: Question
    answer: "asyncio.Future[Answer]"

    def fits(self, answer: Answer) -> bool:
        if isinstance(self.question, AskPages):
            return isinstance(answer, Pages)
        return isinstance(answer, LargePage) and answer.large_page == self.question.large_page


class Watch:
    """Questions to one instance; callers with the same unanswered question share its answer."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._asked: deque[_Asked] = deque()

    async def pages(self, deadline_seconds: float) -> Pages:
        """Return all large pages.

        :raises InstanceDied: when the instance does not serve now.
        :raises TryLater: when the instance does not answer in time.
        """
        answer = await self._ask(AskPages(), deadline_seconds)
        assert isinstance(answer, Pages)
        return answer

    async def large_page(self, number: int, deadline_seconds: float) -> LargePage:
        """Return one large page; errors as in :meth:`pages`."""
        answer = await self._ask(AskLargePage(number), deadline_seconds)
        assert isinstance(answer, LargePage)
        return answer

    def on_answer(self, answer: Answer) -> None:
        if self._asked and self._asked[0].fits(answer):
            self._asked.popleft().answer.set_result(answer)

    def lost(self, problem: str) -> None:
        pending, self._asked = self._asked, deque()
        for question in pending:
            question.answer.set_exception(InstanceDied(problem))
            question.answer.exception()  # read once: perhaps no caller waits any more

    async def _ask(self, question: Question, deadline_seconds: float) -> Answer:
        pending = next((entry for entry in self._asked if entry.question == question), None)
        if pending is None:
            if len(self._asked) >= MOST_QUESTIONS:
                raise TryLater("too many questions to the instance; retry in a moment")
            self._send(question)
            pending = _Asked(question, asyncio.get_running_loop().create_future())
            self._asked.append(pending)
        done, _ = await asyncio.wait([pending.answer], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance showed no pages within {deadline_seconds:g} s")
        return pending.answer.result()


async def pages_of(
    watches: Iterable[tuple[str, Watch]], deadline_seconds: float
) -> dict[str, Pages]:
    """Return the pages of each instance that answers in time, by id."""
    queried = list(watches)
    answers = await asyncio.gather(
        *(watch.pages(deadline_seconds) for _, watch in queried), return_exceptions=True
    )
    shown: dict[str, Pages] = {}
    for (instance_id, _), answer in zip(queried, answers, strict=True):
        if isinstance(answer, Pages):
            shown[instance_id] = answer
        elif not isinstance(answer, TryLater | InstanceDied):
            raise answer
    return shown
