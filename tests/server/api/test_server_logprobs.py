"""How likely tokens were, by their texts: pieces of characters, and the token that stands there."""

import json
from typing import Any

import pytest

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.server.api.bodies.completions import json_pieces
from kvell.server.api.bodies.logprobs import chat_logprobs, completion_logprobs
from kvell.testing.instance import ByteText
from tests.server.api.bodies import events

pytestmark = pytest.mark.xdist_group("fake_server")

FACE = "🙂".encode()
TEXT = ByteText()
SAID = "aé🙂, 玻璃 END b"


def written(body: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(b"".join(json_pieces(body)))
    return read


def told(token: int, *top: tuple[int, float], logprob: float = -9.0) -> TokenLogprobs:
    own = dict(top).get(token, logprob)
    return TokenLogprobs(own, 1, top)


def test_pieces_of_a_character_are_told_apart_by_their_bytes() -> None:
    likely = tuple((byte, -0.5 * place) for place, byte in enumerate((*FACE, ord("a"))))
    body = written(completion_logprobs(TEXT, [FACE[1]], [told(FACE[1], *likely)], [0]))
    assert body["tokens"] == ["bytes:\\x9f"]
    assert body["top_logprobs"] == [
        {
            "bytes:\\xf0": 0.0,
            "bytes:\\x9f": -0.5,
            "bytes:\\x99": -1.0,
            "bytes:\\x82": -1.5,
            "a": -2.0,
        }
    ]
    [one] = written(chat_logprobs(TEXT, [FACE[1]], [told(FACE[1], *likely)]))["content"]
    assert (one["token"], one["bytes"]) == ("\\x9f", [0x9F])
    assert [other["bytes"] for other in one["top_logprobs"]] == [[byte] for byte in (*FACE, 97)]
    assert one["top_logprobs"][-1]["token"] == "a"


class Twins(ByteText):
    """Capital letters have the text of small ones."""

    def token_text(self, token_id: int) -> str:
        return super().token_text(token_id).lower()


def test_of_tokens_with_one_text_none_is_lost() -> None:
    likely = ((ord("A"), -0.5), (ord("a"), -1.0), (ord("b"), -2.0))
    body = written(completion_logprobs(Twins(), [ord("b")], [told(ord("b"), *likely)], [0]))
    assert body["top_logprobs"] == [{"a": -0.5, "token_id:97": -1.0, "b": -2.0}]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_token_that_stands_there_is_among_the_likeliest(count: int) -> None:
    likely = tuple((ord("a") + place, -0.5 * place) for place in range(count))
    for token, is_there in ((ord("a"), count > 0), (ord("z"), False)):
        one = told(token, *likely)
        [top] = written(completion_logprobs(TEXT, [token], [one], [0]))["top_logprobs"]
        assert top[chr(token)] == one.logprob
        assert len(top) == (count if is_there else count + 1)
        assert top.items() >= {chr(other): value for other, value in likely}.items()
        [chat] = written(chat_logprobs(TEXT, [token], [one]))["content"]
        listed = {other["token"]: other["logprob"] for other in chat["top_logprobs"]}
        assert len(chat["top_logprobs"]) == count
        assert not count or listed[chr(token)] == one.logprob
        expected = likely if is_there else likely[: count - 1]
        assert listed.items() >= {chr(other): value for other, value in expected}.items()


def test_the_first_token_of_a_prompt_has_none() -> None:
    body = written(completion_logprobs(TEXT, [97, 98], [None, told(98)], [0, 1]))
    assert (body["token_logprobs"], body["top_logprobs"]) == ([None, -9.0], [None, {"b": -9.0}])


def as_bytes(token: str) -> bytes:
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(code, 16) for code in token.split("\\x")[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "END"])
def test_offsets_are_those_of_the_text_that_was_sent(
    scripted_url: str, stream: bool, echo: bool, stop: str | None
) -> None:
    asked: dict[str, Any] = {"prompt": f"é SAY {SAID}", "logprobs": 1, "echo": echo}
    pieces = events(scripted_url, "completions", stream=stream, stop=stop, **asked)
    text = "".join(piece["text"] for piece in pieces)
    said = SAID.partition("END")[0] if stop else SAID
    assert text == (asked["prompt"] if echo else "") + said
    tokens = [as_bytes(one) for piece in pieces for one in piece["logprobs"]["tokens"]]
    offsets = [one for piece in pieces for one in piece["logprobs"]["text_offset"]]
    spelled = b"".join(tokens).removesuffix(b"\0").decode()
    assert spelled == text + ("END" if stop else "")
    data, place = spelled.encode(), 0
    for token, offset in zip(tokens, offsets, strict=True):
        whole = len(data[:place].decode(errors="ignore"))
        assert offset == min(whole, len(text))
        place += len(token)


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_a_chats_tokens_join_to_its_text(scripted_url: str, stream: bool) -> None:
    messages = [{"role": "user", "content": f"SAY {SAID}"}]
    pieces = events(
        scripted_url,
        "chat/completions",
        messages=messages,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
    )
    heard = [piece["delta" if stream else "message"] for piece in pieces]
    assert "".join(one.get("content") or "" for one in heard) == SAID
    told_of = [one for piece in pieces if piece["logprobs"] for one in piece["logprobs"]["content"]]
    joined = bytes(byte for one in told_of for byte in one["bytes"])
    assert joined.removesuffix(b"\0").decode() == SAID
    assert [one["token"] for one in told_of][1:3] == ["\\xc3", "\\xa9"]
    for one in told_of:
        assert [other["bytes"] for other in one["top_logprobs"]] == [one["bytes"]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_within_a_character_ends_the_same_way_streamed(
    scripted_url: str, stream: bool
) -> None:
    asked = {"prompt": "SAY a🙂", "max_tokens": 3, "logprobs": 0}
    pieces = events(scripted_url, "completions", stream=stream, **asked)
    assert "".join(piece["text"] for piece in pieces) == "a\ufffd"
    assert pieces[-1]["finish_reason"] == "length"
    assert [one for piece in pieces for one in piece["logprobs"]["text_offset"]] == [0, 1, 1]
