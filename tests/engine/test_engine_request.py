"""A request's tokens across prompt and output, and where it is in its life."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.request import NO_HANDLE, Request, RequestState
from kvell.engine.sampling_params import SamplingParams
from kvell.vocabulary import RequestId


def request(prompt: list[int], output: list[int], computed: int = 0) -> Request:
    made = Request(
        RequestId("a"), 0, np.asarray(prompt, np.int32), SamplingParams(), 16, cache_root=""
    )
    made.output.extend(output)
    made.computed = computed
    return made


tokens = st.lists(st.integers(0, 99), max_size=8)


@given(tokens, tokens, st.data())
def test_any_span_of_prompt_and_output_is_int32(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    made, known = request(prompt, output), prompt + output
    start = data.draw(st.integers(0, len(known)))
    end = data.draw(st.integers(start, len(known)))
    span = made.tokens(start, end)
    assert span.dtype == np.int32
    assert span.tolist() == known[start:end]
    assert made.num_tokens == len(known)


def test_a_span_of_the_prompt_is_not_copied() -> None:
    made = request([1, 2, 3], [4])
    assert np.shares_memory(made.tokens(0, 3), made.prompt)


def test_decoding_is_when_only_a_sampled_token_is_left() -> None:
    assert not request([1, 2], [], computed=0).is_decoding
    assert not request([1, 2], [], computed=1).is_decoding, "the prompt's last token"
    assert request([1, 2], [3], computed=2).is_decoding
    assert not request([1, 2], [3], computed=0).is_decoding, "preempted: all is to be recomputed"
    assert request([1, 2], [3], computed=0).remaining == 3


def test_a_new_request_waits_and_holds_nothing() -> None:
    made = request([1], [])
    assert (made.state, made.handle, made.cached_tokens) == (RequestState.WAITING, NO_HANDLE, None)
    assert made.finish_reason is None
