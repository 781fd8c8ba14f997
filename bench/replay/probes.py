"""Single requests, one after the other, against an engine core with ample memory."""

from dataclasses import dataclass, field

import numpy as np

from kvell.engine.core.core import EngineCore
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepResult
from kvell.memory import Eviction, Layout, create_core
from kvell.prefix.index.radix import Tokens
from kvell.vocabulary import RequestId

LONG_TOKENS, SHARED_TOKENS, SHORT_TOKENS = 20_000, 10_000, 300
ANSWER_TOKENS = 333
STEP_TOKENS = 8_192


@dataclass
class Server:
    """An engine core whose model answers with counted tokens."""

    layout: Layout
    eviction: Eviction
    served: int = 0
    engine: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        limits = Limits(STEP_TOKENS, 4, 1 << 17)
        self.engine = EngineCore(
            create_core(self.layout, eviction=self.eviction), limits, frozenset()
        )

    def serve(self, prompt: Tokens, answer_tokens: int) -> tuple[int, Tokens]:
        """Serve a prompt; return its hit tokens, and prompt and answer joined."""
        self.served += 1
        name = RequestId(str(self.served))
        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        self.engine.submit(Submit(name, prompt.astype("<i4").tobytes(), sampling))
        answer = [(1 << 20) + self.served * ANSWER_TOKENS + i for i in range(answer_tokens)]
        while True:
            plan = self.engine.plan()
            tokens = tuple(answer[work.output_index] for work in plan.work if work.samples)
            for event in self.engine.commit(StepResult(plan.step, tokens)):
                if isinstance(event, Finished):
                    return event.cached_tokens, np.concatenate(
                        [prompt, np.asarray(answer, np.int32)]
                    )


def _texts(*lengths: int) -> list[Tokens]:
    """Texts that share nothing."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - size, end, dtype=np.int32)
        for end, size in zip(ends.tolist(), lengths, strict=True)
    ]


def probe(layout: Layout, eviction: Eviction) -> dict[str, int]:
    """Hits of the requests that users notice (see the keys), on one shape."""
    first, second, third, last = _texts(LONG_TOKENS, *[SHARED_TOKENS] * 3)
    shared, short = first[:SHARED_TOKENS], first[:SHORT_TOKENS]
    server = Server(layout, eviction)
    server.serve(first, 1)
    half_second, _ = server.serve(np.concatenate([shared, second]), 1)
    half_third, _ = server.serve(np.concatenate([shared, third]), 1)
    fresh = Server(layout, eviction)
    fresh.serve(first, 1)
    short_second, _ = fresh.serve(np.concatenate([short, last]), 1)
    talk = Server(layout, eviction)
    _, turn = talk.serve(third[: SHARED_TOKENS - 5], ANSWER_TOKENS)
    next_turn, _ = talk.serve(np.concatenate([turn, last[:777]]), ANSWER_TOKENS)
    return {
        "shares_10000_of_20000_second": half_second,
        "shares_10000_of_20000_third": half_third,
        "shares_300_second": short_second,
        "next_turn": next_turn,
        "previous_turn_tokens": len(turn),
    }
