"""An engine and a tokenizer that need no model: for tests, demos and load tests of the front."""

import codecs
import hashlib
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import (
    SCHEMA_VERSION,
    Acknowledgement,
    AskStats,
    Cancel,
    Command,
    Event,
    Finished,
    Ready,
    Submit,
    Tokens,
)
from kvell.engine.protocol.pages import (
    AskLargePage,
    AskPages,
    LargePage,
    PageGroup,
    PageOwner,
    Pages,
)
from kvell.engine.protocol.request_spec import to_token_ids
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.following import make_enforceable
from kvell.engine.protocol.schemas.strict import StrictViolation, find_violation
from kvell.engine.protocol.statistics import (
    InstanceFacts,
    LoadStats,
    ModelLengths,
    ModelWeights,
    Stats,
)
from kvell.engine.sampling.model_defaults import NEUTRAL
from kvell.models.config.embeddings import EmbeddingFacts
from kvell.models.loading.stored_model import StoredModel
from kvell.models.text.answer_text import Preceding
from kvell.models.text.chat_template import NO_FIELDS, with_content
from kvell.models.text.gap_tokens import GapTokens
from kvell.models.text.token_offsets import TokenOffsets
from kvell.vocabulary import FinishReason, RequestId
from kvell.wire.decoding import decode_json

CRASH_TOKEN = 1
"""A prompt with this token makes :meth:`FakeEngine.step` raise."""
REFUSE_TOKEN = 2
"""A prompt with this token is refused."""
EOS_TOKEN = 0
VECTOR_SIZE = 8
CHUNK_TOKENS = 64
"""Prompt tokens that a step computes of a pooling request."""
POOL_BYTES = 1 << 20
TOKEN_BYTES = 64
LARGE_PAGES = 4
STORED = StoredModel(1000, 135_000_000, "5" * 64, 1_700_000_000.0, {"block_count": 3})
WEIGHTS_BYTES = 900


def fake_token(prompt: bytes, index: int) -> int:
    return ord("a") + zlib.crc32(prompt + index.to_bytes(4, "little")) % 26


def fake_logprobs(prompt: bytes, index: int, count: int) -> TokenLogprobs:
    """Return the logprob of output ``index`` of a prompt, and the ``count`` likeliest tokens.

    Candidates are EOS and ``a`` … ``z``, with weights by index and prompt alone.
    """
    seed = zlib.crc32(prompt + index.to_bytes(4, "little"))
    tokens = [EOS_TOKEN, *range(ord("a"), ord("z") + 1)]
    weights = {token: 1 + zlib.crc32(bytes([token]), seed) % 1000 for token in tokens}
    total = sum(weights.values())
    logprobs = {token: math.log(weight / total) for token, weight in weights.items()}
    top = sorted(logprobs.items(), key=lambda item: -item[1])
    token = fake_token(prompt, index)
    rank = 1 + [likely for likely, _ in top].index(token)
    return TokenLogprobs(logprobs[token], rank, tuple(top[:count]))


def fake_vector(prompt: bytes) -> NDArray[np.float32]:
    drawn = np.frombuffer(hashlib.blake2b(prompt, digest_size=VECTOR_SIZE).digest(), np.uint8)
    vector = drawn.astype(np.float32) - 127.5
    return vector / np.linalg.norm(vector)


@dataclass
class _Running:
    submit: Submit
    emitted: int = 0
    computed: int = 0

    def end(self, token: int) -> FinishReason | None:
        if token in self.submit.spec.sampling.stop_token_ids:
            return "stop"
        return "length" if self.emitted == self.submit.spec.sampling.max_tokens else None


class FakeEngine:
    """An engine that makes one token per running request and step, and has a fake prefix cache.

    A pooling request gets its vector once steps have computed the prompt.

    :param beside: names of further models, whose answers differ from the first model's.
    """

    def __init__(
        self,
        *,
        credits: int = 8,  # noqa: A002 - the protocol's word
        step_seconds: float = 0.0,
        incarnation: int = 0,
        max_model_len: int = 4096,
        schema_version: int = SCHEMA_VERSION,
        beside: Sequence[str] = (),
    ) -> None:
        lengths = dict.fromkeys(beside, ModelLengths(max_model_len // 2))
        self._facts = InstanceFacts(
            incarnation,
            credits,
            "fake",
            max_model_len,
            POOL_BYTES,
            lengths,
            weights={"": ModelWeights(WEIGHTS_BYTES, "int8", "cpu")},
        )
        self._schema_version = schema_version
        self._step_seconds = step_seconds
        self._running: dict[RequestId, _Running] = {}
        self._seen: set[tuple[str, bytes]] = set()
        self._steps = 0
        self.finished: dict[str, int] = {}

    def ready(self) -> Ready:
        return Ready(self._schema_version, self._facts)

    def pulse(self) -> LoadStats:
        held = [each.submit.spec.prompt_tokens + each.emitted for each in self._running.values()]
        return LoadStats(
            step=self._steps,
            running=len(held),
            waiting=0,
            large_pages=LARGE_PAGES,
            empty_large_pages=LARGE_PAGES,
            free_bytes=max(0, POOL_BYTES - TOKEN_BYTES * sum(held)),
            pool_bytes=POOL_BYTES,
        )

    def wakes(self) -> int | None:
        return None

    def woken(self) -> list[Event]:
        return []

    def has_work(self) -> bool:
        return bool(self._running)

    def has_requests(self) -> bool:
        return bool(self._running)

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Submit):
            return self._submit(command)
        if isinstance(command, Cancel) and command.request_id in self._running:
            return [self._finish(self._running[command.request_id], "cancelled")]
        if isinstance(command, AskPages):
            return [self._pages()]
        if isinstance(command, AskLargePage):
            return [self._large_page(command.large_page)]
        return [self._stats()] if isinstance(command, AskStats) else []

    def step(self) -> list[Event]:
        time.sleep(self._step_seconds)
        self._steps += 1
        return [event for each in list(self._running.values()) for event in self._advance(each)]

    def _submit(self, submit: Submit) -> list[Event]:
        output = to_token_ids(submit.output)
        running = self._running[submit.request_id] = _Running(submit, len(output))
        if REFUSE_TOKEN in submit.spec.token_ids:
            return [self._finish(running, "refused", "prompt=…: can never fit; shorten it")]
        if (violation := _strict_violation(submit.spec.sampling)) is not None:
            error = violation.error()
            return [self._finish(running, "refused", str(error), error.field)]
        reason = running.end(int(output[-1])) if len(output) else None
        if reason:
            return [self._finish(running, reason)]
        return [Acknowledgement(submit.request_id, submit.attempt)]

    def _advance(self, running: _Running) -> list[Event]:
        submit, spec = running.submit, running.submit.spec
        if CRASH_TOKEN in submit.spec.token_ids:
            raise RuntimeError("the fake engine crashes: the prompt asks for it")
        if spec.pooling:
            running.computed += CHUNK_TOKENS
            is_done = running.computed >= spec.prompt_tokens
            return [self._finish(running, "stop")] if is_done else []
        text = spec.prompt + spec.model.encode()
        num_top = spec.sampling.logprobs
        token = fake_token(text, running.emitted)
        logprobs = () if num_top is None else (fake_logprobs(text, running.emitted, num_top),)
        tokens = Tokens(submit.request_id, submit.attempt, running.emitted, (token,), logprobs)
        running.emitted += 1
        reason = running.end(token)
        return [tokens, self._finish(running, reason)] if reason else [tokens]

    def _finish(
        self, running: _Running, reason: FinishReason, message: str = "", field: str = ""
    ) -> Finished:
        submit, spec = running.submit, running.submit.spec
        del self._running[submit.request_id]
        prompt_tokens = spec.prompt_tokens
        prefix = (spec.cache_salt, spec.prompt)
        cached = prompt_tokens - 1 if prefix in self._seen else 0
        written = max(0, prompt_tokens - 1 - cached)
        self._seen.add(prefix)
        self.finished[reason] = self.finished.get(reason, 0) + 1
        counts = (prompt_tokens, running.emitted, cached)
        vector = fake_vector(spec.prompt) if spec.pooling and reason == "stop" else None
        embedding = b"" if vector is None else vector.astype("<f4").tobytes()
        return Finished(
            submit.request_id,
            submit.attempt,
            reason,
            *counts,
            message=message,
            field=field,
            embedding=embedding,
            cache_write_tokens=written,
        )

    def _pages(self) -> Pages:
        used = np.zeros(LARGE_PAGES, "<u4")
        used[: len(self._running)] = 1
        group = np.where(used > 0, 0, -1).astype("<i2")
        nothing = np.zeros(LARGE_PAGES, "<u4").tobytes()
        groups = (PageGroup("full", "full", 1, 16, POOL_BYTES // LARGE_PAGES, 1),)
        columns = (group.tobytes(), used.tobytes(), nothing, nothing)
        return Pages(self._facts.incarnation, self._steps, groups, *columns)

    def _large_page(self, number: int) -> LargePage:
        running = list(self._running.values())
        if not 0 <= number < min(LARGE_PAGES, len(running)):
            return LargePage(number, self._steps)
        tokens = running[number].submit.spec.prompt_tokens + running[number].emitted
        owner = PageOwner(running[number].submit.request_id, 1, 0, tokens)
        return LargePage(number, self._steps, group=0, used=1, owners=(owner,))

    def _stats(self) -> Stats:
        return Stats(
            incarnation=self._facts.incarnation,
            step=self._steps,
            running=len(self._running),
            waiting=0,
            large_pages=LARGE_PAGES,
            empty_large_pages=LARGE_PAGES,
            kv_cache_usage=0.0,
            prompt_tokens=0,
            output_tokens=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            preemptions=0,
            finished=dict(self.finished),
        )


def _strict_violation(sampling: SamplingParams) -> StrictViolation | None:
    constraint = sampling.structured_outputs
    if constraint is None or constraint.json is None or not constraint.strict:
        return None
    unfollowed = make_enforceable(decode_json(constraint.json)).unfollowed
    return find_violation(constraint.strict, unfollowed)


class ByteText:
    """A ``TextModel`` whose tokens are the bytes of UTF-8."""

    vocab_size = 256
    eos_token_ids = frozenset({EOS_TOKEN})
    model_type = "bytes"
    embeddings = EmbeddingFacts(VECTOR_SIZE, is_matryoshka=True, sizes=(2, 4))
    stored = STORED
    gap_tokens: GapTokens | None = GapTokens(
        (ord("<"), "before", ord("|"), "after", ord(">")), (ord("|"),)
    )

    def __init__(
        self,
        name: str = "fake",
        chat_template: str = "",
        sampling_defaults: SamplingParams = NEUTRAL,
        takes_tools: bool | None = True,
    ) -> None:
        self.name = name
        self.chat_template = chat_template
        self.sampling_defaults = sampling_defaults
        self.takes_tools = takes_tools

    def tokenizer_info(self) -> dict[str, object]:
        return {"tokenizer_class": type(self).__name__}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    most_token_bytes = 1

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        return self.encode(self.rendered_chat(messages))

    def rendered_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
    ) -> str:
        lines = [f"tool: {tool['function']['name']}\n" for tool in tools or ()]
        lines += [f"{name}={value}\n" for name, value in fields.items()]
        plain = with_content(messages, frozenset())
        lines += [f"{message['role']}: {message['content']}\n" for message in plain]
        text = "".join(lines) + "assistant: " * opens_answer
        return text.removesuffix("\n") if continues_last else text

    takes_images = False

    def encode_pictured(self, *_: object, **__: object) -> NoReturn:
        """Raise an error: bytes have no images."""
        raise NotImplementedError("takes_images is False")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> "ByteDetokenizer":
        return ByteDetokenizer()

    def token_offsets(
        self, *, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> TokenOffsets:
        return TokenOffsets(self.token_bytes)


class ByteDetokenizer:
    """A decoder of whole characters from a byte stream."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
