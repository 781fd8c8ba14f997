"""Images of requests that move: what goes along, what is checked, and that nothing stays behind."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.running import moved_images
from kvell.engine.running.moved_images import MovedImages
from kvell.engine.running.sent_images import SentImages, to_sent
from kvell.memory import create_core
from kvell.mempool.agent import Agent
from kvell.mempool.entries import Heard, PeerLost, Ticked
from kvell.mempool.transfers.actions import Revoke, Send
from kvell.mempool.transfers.messages import (
    Abandon,
    Ask,
    Declined,
    Offer,
    Prepare,
    Prepared,
    Transfer,
)
from kvell.models.images.image_families import PatchImages
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId
from tests.engine.seen import content_ids_of, spans_of
from tests.engine.works import with_spec
from tests.models.pictures import PATCHES, Prompt, picture_module, pictured, text
from tests.pages.pools import group, pool_of

NAME = RequestId("a")


@dataclass
class Side:
    name: str
    here: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = ImageStore(PatchImages(picture_module(PATCHES)))
        self.sent = SentImages(self.store, keeps_tensors=True)
        self.agent = Agent(create_core(pool_of(90, group(4, 2))), self.name, 1, "x")
        self.agent.handle(Ticked(1))
        self.moved = MovedImages(
            self.store, self.sent, self.agent, lambda name, attempt: (name, attempt) in self.here
        )

    def begin(self, command: Submit, *, inserts: bool = False) -> Send:
        """Announce a request, or copy its text."""
        images = None if inserts else np.asarray(command.spec.images, np.int32)
        _, [send] = self.agent.sending.begin(
            "b",
            ids_of(command),
            len(command.spec.prompt) // 4,
            self.agent.now,
            self.agent.now + 100,
            inserts=inserts,
            images=images,
            private=b"" if inserts else msgspec.msgpack.encode(command),
        )
        assert isinstance(send, Send)
        return send


@pytest.fixture
def a() -> Side:
    return Side("a")


@pytest.fixture
def b() -> Side:
    return Side("b")


def ids_of(command: Submit) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.frombuffer(command.spec.prompt, "<i4").astype(np.int32)


def submit(prompt: Prompt, name: str = NAME, attempt: int = 0) -> Submit:
    ids = np.asarray(prompt.token_ids, "<i4").tobytes()
    tensors = tuple(to_sent(key, tensor) for key, tensor in prompt.tensors.items())
    return Submit(
        RequestSpec(RequestId(name), ids, SamplingParams(), tensors=tensors), attempt=attempt
    )


def prompt_of(seed: int = 0) -> Prompt:
    return pictured(PATCHES, text(4, seed), seed, text(3, seed))


def announced(side: Side, command: Submit) -> Prepare:
    action = side.moved.outgoing(side.begin(side.sent.take(command)))
    assert isinstance(action, Send) and isinstance(action.message, Prepare)
    return action.message


def why(action: object) -> str:
    assert isinstance(action, Send | Heard) and isinstance(action.message, Abandon)
    return action.message.why


def test_tensors_go_along_and_the_core_sees_none(a: Side, b: Side) -> None:
    message = announced(a, submit(prompt_of()))
    assert message.attached and message.contents
    told = b.moved.incoming(Heard("a", message))
    assert isinstance(told, Heard) and isinstance(told.message, Prepare)
    assert (told.message.attached, told.message.contents) == (b"", b"")
    assert replace_fields(message) == told.message
    command = msgspec.msgpack.decode(message.private, type=Submit)
    [(start, tokens, _)] = command.spec.images
    content = int(ids_of(command)[start + tokens - 1])
    assert b.store.knows([content]) and b.store.span(content).digest == a.store.span(content).digest


def replace_fields(message: Prepare) -> Prepare:
    return msgspec.structs.replace(message, attached=b"", contents=b"")


def arrive(a: Side, b: Side, command: Submit) -> None:
    """A request is announced, and its pages come."""
    told = b.moved.incoming(Heard("a", announced(a, command)))
    assert isinstance(told, Heard) and isinstance(told.message, Prepare)
    [answer] = b.agent.handle(told)
    b.moved.settle()
    assert isinstance(answer, Send) and isinstance(answer.message, Prepared)
    pages = np.arange(len(answer.message.missing) // 8, dtype="<i4").tobytes()
    b.agent.handle(Heard("a", Offer(told.message.transfer, pages)))
    b.moved.settle()
    attempt = command.request_id, command.attempt
    assert spans_of(b.store) and b.sent.of(attempt) is None
    b.agent.receiving.on_pulled(told.message.transfer, "")
    b.here.add(attempt)
    b.moved.settle()


def test_what_has_come_is_known_until_it_ends_and_can_go_on(a: Side, b: Side) -> None:
    command = submit(prompt_of())
    arrive(a, b, command)
    taken = b.sent.of((NAME, 0))
    assert taken is not None and (taken.prompt, taken.tensors) == (
        command.spec.prompt,
        command.spec.tensors,
    )
    again = b.moved.outgoing(b.begin(told_to(b, command)))
    assert isinstance(again, Send) and isinstance(again.message, Prepare)
    b.sent.release_ended([Finished(NAME, 0, "moved")])
    assert not spans_of(b.store) and not len(b.sent)


def told_to(side: Side, command: Submit) -> Submit:
    """A request as the engine there knows it, whose images it has."""
    taken = side.sent.of((command.request_id, command.attempt))
    assert taken is not None
    ids = taken.image_prompt.token_ids.astype("<i4").tobytes()
    return with_spec(command, prompt=ids, images=taken.image_prompt.images, tensors=())


def test_the_end_of_an_earlier_attempt_releases_only_its_own(a: Side, b: Side) -> None:
    b.sent.take(submit(prompt_of()))
    arrive(a, b, submit(prompt_of(), attempt=1))
    b.sent.release_ended([Finished(NAME, 0, "cancelled")])
    assert len(spans_of(b.store)) == 1 and b.sent.of((NAME, 1)) is not None
    b.sent.release_ended([Finished(NAME, 1, "stop")])
    assert not spans_of(b.store)


@pytest.mark.parametrize("end", ["abandoned", "died", "late", "refused"])
def test_what_does_not_come_is_released(end: str, a: Side, b: Side) -> None:
    told = b.moved.incoming(Heard("a", announced(a, submit(prompt_of()))))
    assert isinstance(told, Heard) and isinstance(told.message, Prepare)
    message = told.message
    if end == "refused":
        message = msgspec.structs.replace(message, fingerprint="other")
    b.agent.handle(Heard("a", message))
    if end == "abandoned":
        b.agent.handle(Heard("a", Abandon(message.transfer, "it has ended")))
    elif end == "died":
        b.agent.handle(PeerLost("a", 1))
    elif end == "late":
        b.agent.handle(Ticked(1000))
    b.moved.settle()
    assert not spans_of(b.store) and not len(b.sent)


def test_a_message_that_comes_twice_takes_its_images_once(a: Side, b: Side) -> None:
    message = announced(a, submit(prompt_of()))
    for _ in range(2):
        told = b.moved.incoming(Heard("a", message))
        assert isinstance(told, Heard)
        b.agent.handle(told)
        b.moved.settle()
    b.agent.handle(PeerLost("a", 1))
    b.moved.settle()
    assert not spans_of(b.store)


def occupied(side: Side, message: Prepare | Ask) -> None:
    """The text's first id of images stands for something else there."""
    content = min(np.frombuffer(message.tokens, "<i4").tolist())
    other = (-1 - content << 1).to_bytes(4, "little") + b"another image"[:12]
    assert content_ids_of(side.store).id_of(other) == content


@pytest.mark.parametrize("inserts", [False, True])
def test_an_id_that_stands_for_another_image_is_refused(inserts: bool, a: Side, b: Side) -> None:
    """Of a request that moves, and of a text that is copied to be cached."""
    action = a.moved.outgoing(a.begin(a.sent.take(submit(prompt_of())), inserts=inserts))
    assert isinstance(action, Send) and isinstance(action.message, Prepare)
    assert bool(action.message.attached) != inserts
    occupied(b, action.message)
    answer = b.moved.incoming(Heard("a", action.message))
    assert "another image" in why(answer)
    assert not spans_of(b.store)
    again = Side("c")
    assert isinstance(again.moved.incoming(Heard("a", action.message)), Heard)


def test_a_copy_whose_contents_are_not_told_is_refused(a: Side, b: Side) -> None:
    send = a.begin(a.sent.take(submit(prompt_of())), inserts=True)
    assert "another image" in why(b.moved.incoming(Heard("a", send.message)))


def test_who_is_asked_checks_the_ids_too(a: Side, b: Side) -> None:
    command = a.sent.take(submit(prompt_of()))
    _, [ask] = a.agent.asking.ask("b", ids_of(command), 1, 100)
    action = a.moved.outgoing(ask)
    assert isinstance(action, Send) and isinstance(action.message, Ask) and action.message.contents
    told = b.moved.incoming(Heard("a", action.message))
    assert isinstance(told, Heard)
    assert told.message == msgspec.structs.replace(action.message, contents=b"")
    other = Side("c")
    occupied(other, action.message)
    answer = other.moved.incoming(Heard("a", action.message))
    assert isinstance(answer, Send) and isinstance(answer.message, Declined)
    assert answer.message.number == action.message.number


@pytest.mark.parametrize("damage", ["attached", "private", "prompt", "images"])
def test_images_that_cannot_be_read_are_refused(damage: str, a: Side, b: Side) -> None:
    message = announced(a, submit(prompt_of()))
    command = msgspec.msgpack.decode(message.private, type=Submit)
    fields: dict[str, Any] = {damage: b"no msgpack"}
    if damage == "prompt":
        fields = {
            "private": msgspec.msgpack.encode(with_spec(command, prompt=command.spec.prompt[4:]))
        }
    elif damage == "images":
        fields = {"private": msgspec.msgpack.encode(with_spec(command, images=((0, 1, 1),)))}
    answer = b.moved.incoming(Heard("a", msgspec.structs.replace(message, **fields)))
    assert why(answer).startswith("its images")
    b.moved.settle()
    assert not spans_of(b.store)


def test_images_that_did_not_come_with_their_request_stay(a: Side) -> None:
    """As where a caller in the same process gave them to the store."""
    prompt = prompt_of()
    made = a.store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    ids = made.token_ids.astype("<i4").tobytes()
    command = Submit(RequestSpec(NAME, ids, SamplingParams(), images=made.images))
    answer = a.moved.outgoing(a.begin(command))
    assert isinstance(answer, Heard) and answer.peer == "b"
    assert "its images are missing" in why(answer)
    [ended] = a.agent.handle(answer)
    assert not isinstance(ended, Send | Revoke), "nobody was asked"


def test_no_more_goes_at_once_than_a_connection_takes(
    a: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [submit(prompt_of(seed), f"q{seed}") for seed in range(3)]
    sizes = [sum(len(one.data) for one in command.spec.tensors) for command in commands]
    monkeypatch.setattr(moved_images, "MOST_BYTES", sizes[0] - 1)
    told = a.begin(a.sent.take(commands[0]))
    assert "more than" in why(a.moved.outgoing(told))
    monkeypatch.setattr(moved_images, "MOST_BYTES", sizes[1] + sizes[2] - 1)
    first = announced(a, commands[1])
    second = a.begin(a.sent.take(commands[2]))
    assert "too many" in why(a.moved.outgoing(second))
    a.moved.incoming(Heard("b", Prepared(first.transfer, b"")))
    assert isinstance(a.moved.outgoing(second), Send), "the first one was answered"
    a.agent.handle(PeerLost("b", 1))
    a.moved.settle()
    assert isinstance(a.moved.outgoing(told), Send | Heard)


def test_texts_and_other_messages_pass_untouched(a: Side) -> None:
    _, [send] = a.agent.sending.begin("b", np.arange(9, dtype=np.int32), 9, 1, 9)
    assert a.moved.outgoing(send) is send
    for entry in (
        Ticked(3),
        PeerLost("b", 1),
        Heard("b", Prepared(Transfer("a", 1, 9), b"")),
        Heard("b", Offer(Transfer("b", 1, 1), b"")),
    ):
        assert a.moved.incoming(entry) is entry
