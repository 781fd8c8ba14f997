"""A request's mailbox: nothing is lost, doubled or out of order, and nobody waits in vain."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.messages import Finished
from kvell.front.mailbox import Mailbox, Output
from kvell.vocabulary import RequestId

END = Finished(RequestId("a"), 0, "stop")


async def all_of(mailbox: Mailbox) -> list[Output]:
    outputs = [await mailbox.take()]
    while outputs[-1].finished is None:
        outputs.append(await mailbox.take())
    return outputs


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2))))
def test_every_token_is_taken_once_and_in_order(puts: list[tuple[int, int]]) -> None:
    """Each put has so many tokens, and the loop turns so often behind it."""

    async def scenario() -> list[Output]:
        mailbox, index = Mailbox(), 0
        reading = asyncio.ensure_future(all_of(mailbox))
        for count, turns in puts:
            mailbox.put(tuple(range(index, index + count)))
            index += count
            for _ in range(turns):
                await asyncio.sleep(0)
        mailbox.finish(END)
        return await asyncio.wait_for(reading, 10)

    outputs = asyncio.run(scenario())
    taken = [token for output in outputs for token in output.token_ids]
    assert taken == list(range(sum(count for count, _ in puts)))
    assert all(output.token_ids for output in outputs[:-1])
    assert [output.finished for output in outputs] == [None] * (len(outputs) - 1) + [END]


def test_only_the_first_end_counts() -> None:
    async def scenario() -> Output:
        mailbox = Mailbox()
        mailbox.finish(END)
        mailbox.finish(Finished(RequestId("a"), 0, "error"))
        return await mailbox.take()

    assert asyncio.run(scenario()) == Output((), END)


def test_a_reader_that_went_away_is_in_nobodys_way() -> None:
    async def scenario() -> Output:
        mailbox = Mailbox()
        reading = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        reading.cancel()
        mailbox.put((1,))
        with pytest.raises(asyncio.CancelledError):
            await reading
        mailbox.put((2,))
        return await mailbox.take()

    assert asyncio.run(scenario()) == Output((1, 2))
