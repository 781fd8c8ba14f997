import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.front import Front
from kvell.front.request_log import Output
from kvell.server.text.text_stream import (
    TextDelta,
    text_deltas,
)
from kvell.testing.instance import ByteText
from kvell.vocabulary import FinishReason, RequestId
from tests.engine.works import spec_of


class Script:
    """A front that says what it was given; it notes when it is told to stop or is left."""

    def __init__(self, *outputs: Output) -> None:
        self._outputs = outputs
        self.stopped: list[str] = []
        self.left = False

    async def generate(self, spec: object, **_more: object) -> AsyncGenerator[Output, None]:
        try:
            for output in self._outputs:
                yield output
        finally:
            self.left = True

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)


def ended(reason: FinishReason, message: str = "", cached: int = 0, **more: Any) -> Output:
    finished = Finished(RequestId("r"), 0, reason, cached_tokens=cached, message=message, **more)
    return Output((), finished)


def spec(sampling: SamplingParams | None = None) -> RequestSpec:
    return spec_of([0, 0, 0], sampling or SamplingParams(), "r")


def deltas(script: Script, sampling: SamplingParams | None = None) -> list[TextDelta]:
    async def gather() -> list[TextDelta]:
        front = cast(Front, script)
        stream = text_deltas(front, ByteText(), spec(sampling))
        return [delta async for _, delta in stream]

    return asyncio.run(gather())
