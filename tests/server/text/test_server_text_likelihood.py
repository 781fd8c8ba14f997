"""Text deltas of requests that ask how likely their tokens are: one likelihood for each token."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import Output
from kvell.server.text.text_stream import TextDelta, Usage
from kvell.testing.instance import EOS_TOKEN
from tests.server.text.scripts import Script, deltas, ended

PROMPT = tuple(TokenLogprobs(-float(place), place) for place in (1, 2))


def likely(place: int) -> TokenLogprobs:
    return TokenLogprobs(-0.25 * place, 1 + place, ((place, -0.25 * place),))


def outputs(data: bytes, cuts: list[int]) -> list[Output]:
    """A text's tokens as they may arrive, the prompt's likelihoods with the first."""
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    parts = [
        Output(tuple(data[start:end]), logprobs=tuple(map(likely, range(start, end))))
        for start, end in pairwise(bounds)
    ]
    if parts:
        parts[0] = replace(parts[0], prompt_logprobs=PROMPT)
    return parts


def assert_aligned(found: list[TextDelta], data: bytes) -> int:
    """Check that tokens come in order, each with its own likelihood; return how many came."""
    for delta in found:
        assert len(delta.logprobs) == len(delta.token_ids)
    told = [token for delta in found for token in delta.token_ids]
    assert bytes(told) == data[: len(told)]
    each = [logprob for delta in found for logprob in delta.logprobs]
    assert each == [likely(place) for place in range(len(told))]
    prompt = [one for delta in found for one in delta.prompt_logprobs]
    assert prompt == (list(PROMPT) if told else [])
    return len(told)


words = st.text(alphabet="abé🙂", max_size=24)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3)
cut_lists = st.lists(st.integers(0, 1000), max_size=6)


@given(words, stops, cut_lists, st.booleans())
def test_likelihoods_stay_with_their_tokens(
    text: str, stop: list[str], cuts: list[int], late: bool
) -> None:
    data = text.encode()
    script = outputs(data, cuts)
    if late or not script:
        script.append(ended("length"))
    else:
        script[-1] = replace(script[-1], finished=ended("length").finished)
    found = deltas(Script(*script), SamplingParams(stop=tuple(stop), logprobs=1))
    count = assert_aligned(found, data)
    assert count == found[-1].usage.completion_tokens
    ends = [at + len(each) for each in stop if (at := text.find(each)) >= 0]
    assert count == len(text[: min(ends)].encode() if ends else data)
    assert found[-1].finish_reason == ("stop" if ends else "length")


def test_what_comes_behind_a_stop_string_is_told_of_nobody() -> None:
    data = b"hi STOP, and more"
    script = Script(*outputs(data, [5, 9]), ended("stop"))
    found = deltas(script, SamplingParams(stop=("STOP",), logprobs=1))
    assert "".join(delta.text for delta in found) == "hi "
    assert assert_aligned(found, data) == len(b"hi STOP")
    assert script.stopped


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_tokens_without_a_text_are_told_with_what_follows(stop: tuple[str, ...]) -> None:
    data = bytes([*"é".encode(), 97, EOS_TOKEN])
    script = Script(*outputs(data, [1, 2, 3]), ended("stop"))
    found = deltas(script, SamplingParams(stop=stop, logprobs=1))
    assert [(delta.text, len(delta.logprobs)) for delta in found] == [("é", 2), ("a", 1), ("", 1)]
    assert assert_aligned(found, data) == 4


def test_a_request_that_asked_only_of_its_prompt_is_told_of_it_once() -> None:
    first = Output((97,), prompt_logprobs=PROMPT)
    assert deltas(Script(first, Output((98,)), ended("length"))) == [
        TextDelta("a", token_ids=(97,), prompt_logprobs=PROMPT),
        TextDelta("b", token_ids=(98,)),
        TextDelta("", "length", Usage(3, 2, 0)),
    ]
