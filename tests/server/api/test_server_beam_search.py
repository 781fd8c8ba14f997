"""Beam search over fake instances: the planner's answers, bounds, and refused fields."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from kvell.engine.requests.beam_search import Beam, BeamSearch, BeamSearchParams
from kvell.testing.instance import EOS_TOKEN, ByteText, fake_logprobs
from tests.server.api.bodies import is_idle, metric

pytestmark = pytest.mark.xdist_group("fake_server")

BEAMS = {"use_beam_search": True, "temperature": 0}
MESSAGES = [{"role": "user", "content": "hi"}]


def found(prompt: "np.ndarray[Any, Any]", params: BeamSearchParams) -> tuple[Beam, ...]:
    search = BeamSearch.of(params, frozenset({EOS_TOKEN}))
    while not search.is_over:
        texts = [np.concatenate([prompt, beam.token_ids]) for beam in search.running]
        ids = [text.astype("<i4").tobytes() for text in texts]
        search = search.after([fake_logprobs(one, 0, search.candidates) for one in ids])
    return search.finished


def found_behind(text: str, params: BeamSearchParams) -> tuple[Beam, ...]:
    return found(ByteText().encode(text), params)


def text_of(beam: Beam) -> str:
    return bytes(token for token in beam.token_ids if token != EOS_TOKEN).decode()


def completion(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 6, **BEAMS, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"n": 3}, BeamSearchParams(3, 6)),
        ({"n": 2, "best_of": 5}, BeamSearchParams(5, 6)),
        ({"best_of": 4}, BeamSearchParams(4, 6)),
        ({}, BeamSearchParams(1, 6)),
        ({"n": 4, "length_penalty": 0, "max_tokens": 9}, BeamSearchParams(4, 9, length_penalty=0)),
        (
            {"n": 4, "early_stopping": True, "stop_token_ids": [100, 101]},
            BeamSearchParams(4, 6, early_stopping=True, stop_token_ids=(100, 101)),
        ),
        (
            {"n": 4, "early_stopping": "never", "length_penalty": 2.5, "max_tokens": 12},
            BeamSearchParams(4, 12, early_stopping="never", length_penalty=2.5),
        ),
        ({"n": 5, "ignore_eos": True}, BeamSearchParams(5, 6, ignore_eos=True)),
        ({"n": 5, "min_tokens": 4}, BeamSearchParams(5, 6, min_tokens=4)),
        ({"n": 10, "temperature": 0.7, "seed": 3, "top_k": -1}, BeamSearchParams(10, 6)),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_answers_are_the_best_beams(
    server_url: str, fields: dict[str, Any], params: BeamSearchParams
) -> None:
    reply = completion(server_url, return_token_ids=True, **fields)
    assert reply.status_code == 200, reply.text
    beams = found_behind("hi", params)[: fields.get("n", 1)]
    choices = reply.json()["choices"]
    assert [one["token_ids"] for one in choices] == [list(beam.token_ids) for beam in beams]
    assert [one["index"] for one in choices] == list(range(len(beams)))
    for choice, beam in zip(choices, beams, strict=True):
        assert choice["finish_reason"] == beam.finish_reason
        silent = params.stop_token_ids
        assert choice["text"] == "".join(one for one in text_of(beam) if ord(one) not in silent)
    usage = reply.json()["usage"]
    tokens = sum(len(beam.token_ids) for beam in beams)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, tokens)


def test_every_prompt_has_its_own_beams(server_url: str) -> None:
    reply = completion(server_url, prompt=["one", "two"], n=2)
    told = [choice["text"] for choice in reply.json()["choices"]]
    each = [found_behind(text, BeamSearchParams(2, 6)) for text in ("one", "two")]
    assert told == [text_of(beam) for beams in each for beam in beams]


def test_a_chat_is_answered_by_beams(server_url: str) -> None:
    body = {"messages": MESSAGES, "n": 3, "max_tokens": 6, **BEAMS}
    reply = httpx.post(f"{server_url}/v1/chat/completions", json=body, timeout=60).json()
    beams = found(ByteText().encode_chat(MESSAGES), BeamSearchParams(3, 6))
    told = [choice["message"]["content"] for choice in reply["choices"]]
    assert told == [text_of(beam) for beam in beams]


def test_probabilities_are_those_of_the_beam(server_url: str) -> None:
    [choice] = completion(server_url, best_of=3, logprobs=2).json()["choices"]
    beam = found_behind("hi", BeamSearchParams(3, 6, logprobs=2))[0]
    told = choice["logprobs"]
    assert told["token_logprobs"] == pytest.approx([one.logprob for one in beam.logprobs])
    assert len(told["top_logprobs"]) == len(beam.token_ids)
    assert {len(one) for one in told["top_logprobs"]} <= {2, 3}, "the beam's own token is there too"
    assert completion(server_url, best_of=3).json()["choices"][0]["logprobs"] is None


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"n": 11}, "n"),
    ({"n": 1, "best_of": 11}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"stream": True}, "stream"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"stop": "x"}, "stop"),
    ({"guided_regex": "a+"}, "use_beam_search"),
    ({"response_format": {"type": "json_object"}}, "use_beam_search"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"length_penalty": "long"}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"stop_token_ids": list(range(3, 23))}, "stop_token_ids"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ({"use_beam_search": False, "n": 1, "best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS)
def test_what_does_not_go_with_beams_is_refused_by_name(
    server_url: str, fields: dict[str, Any], param: str
) -> None:
    reply = completion(server_url, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_what_says_nothing_is_taken(server_url: str) -> None:
    plain: dict[str, Any] = {
        "top_p": 1,
        "top_k": 0,
        "min_p": 0,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    more: dict[str, Any] = {"stop": [], "response_format": {"type": "text"}, "length_penalty": None}
    assert completion(server_url, **plain, **more).status_code == 200
    said = {"length_penalty": 1.0, "early_stopping": False}
    assert completion(server_url, use_beam_search=False, **said).status_code == 200
    assert completion(server_url, use_beam_search=None, **said).status_code == 200


def test_forced_calls_do_not_go_with_beams(server_url: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", **BEAMS}
    reply = httpx.post(f"{server_url}/v1/chat/completions", json=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "use_beam_search")


def left(url: str) -> float:
    name = 'http_responses_total{model_name="fake",path="/v1/completions",status="499"'
    return metric(url, name)


def assert_nothing_goes_on(url: str) -> None:
    """What is made from now on is what is asked for from now on."""
    for _ in range(500):
        if is_idle(url):
            break
    else:
        raise AssertionError("its beams go on")
    before = metric(url, "generation_tokens_total")
    assert completion(url, use_beam_search=False).json()["usage"]["completion_tokens"] == 6
    assert metric(url, "generation_tokens_total") - before == 6


def test_a_client_that_leaves_ends_all_beams(server_url: str) -> None:
    before = left(server_url)
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "hi", "n": 4, "max_tokens": 3000, "ignore_eos": True, **BEAMS}
        httpx.post(f"{server_url}/v1/completions", json=body, timeout=0.3)
    for _ in range(500):
        if left(server_url) > before:
            break
    else:
        raise AssertionError("nobody noticed that the client left")
    assert_nothing_goes_on(server_url)


def test_a_deadline_ends_all_beams(server_url: str) -> None:
    reply = completion(server_url, n=4, max_tokens=3000, ignore_eos=True, deadline_seconds=0.2)
    assert reply.status_code == 408
    assert "deadline_seconds=0.2" in json.dumps(reply.json())
    assert_nothing_goes_on(server_url)


def test_each_step_is_a_request_for_every_beam(server_url: str) -> None:
    before = metric(server_url, "generation_tokens_total")
    beams = found_behind("counted", BeamSearchParams(3, 6, ignore_eos=True))
    assert {len(beam.token_ids) for beam in beams} == {6}
    assert completion(server_url, prompt="counted", n=3, ignore_eos=True).status_code == 200
    assert metric(server_url, "generation_tokens_total") - before == 1 + 3 * 5
