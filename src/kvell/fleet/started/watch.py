"""What people who watch the pool ask of instances: answered in order, and in bounded time."""

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
"""Most questions to one instance that wait for their answers."""


@dataclass(frozen=True)
class _Asked:
    question: Question
    answer: "asyncio.Future[Answer]"

    def fits(self, answer: Answer) -> bool:
        """Whether this is what was asked for."""
        if isinstance(self.question, AskPages):
            return isinstance(answer, Pages)
        return isinstance(answer, LargePage) and answer.large_page == self.question.large_page


class Watch:
    """Questions to one instance; callers that ask the same before the answer came share it.

    :param send: sends a command to the instance.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._asked: deque[_Asked] = deque()

    async def pages(self, deadline_seconds: float) -> Pages:
        """Every large page.

        :raises InstanceDied: when the instance does not serve just now.
        :raises TryLater: when it does not answer in time.
        """
        answer = await self._ask(AskPages(), deadline_seconds)
        assert isinstance(answer, Pages)
        return answer

    async def large_page(self, number: int, deadline_seconds: float) -> LargePage:
        """One large page; errors as of :meth:`pages`."""
        answer = await self._ask(AskLargePage(number), deadline_seconds)
        assert isinstance(answer, LargePage)
        return answer

    def heard(self, answer: Answer) -> None:
        """Give an answer to those who wait for it; one that nobody asked for is dropped."""
        if self._asked and self._asked[0].fits(answer):
            self._asked.popleft().answer.set_result(answer)

    def lost(self, problem: str) -> None:
        """The instance died: nobody waits any longer."""
        asked, self._asked = self._asked, deque()
        for one in asked:
            one.answer.set_exception(InstanceDied(problem))
            one.answer.exception()  # read once: perhaps nobody waits any more

    async def _ask(self, question: Question, deadline_seconds: float) -> Answer:
        asked = next((one for one in self._asked if one.question == question), None)
        if asked is None:
            if len(self._asked) >= MOST_QUESTIONS:
                raise TryLater("the instance is asked for too much; come back in a moment")
            self._send(question)
            asked = _Asked(question, asyncio.get_running_loop().create_future())
            self._asked.append(asked)
        done, _ = await asyncio.wait([asked.answer], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance showed no pages within {deadline_seconds:g} s")
        return asked.answer.result()


async def pages_of(
    watches: Iterable[tuple[str, Watch]], deadline_seconds: float
) -> dict[str, Pages]:
    """The pages of every instance that answers in time, by id; the others are left out."""
    asked = list(watches)
    answers = await asyncio.gather(
        *(watch.pages(deadline_seconds) for _, watch in asked), return_exceptions=True
    )
    shown: dict[str, Pages] = {}
    for (instance_id, _), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Pages):
            shown[instance_id] = answer
        elif not isinstance(answer, TryLater | InstanceDied):
            raise answer
    return shown
