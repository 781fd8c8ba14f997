"""Transfers of texts with images: pages of images come too, whole or not at all."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvell.memory import GroupKind, Ints
from kvell.mempool.transfers.actions import Send
from kvell.mempool.transfers.messages import Abandon, Prepare, Prepared, Transfer
from kvell.pages.layout import GroupSpec
from tests.mempool.transfers.network import Instance, Network, ints
from tests.pages.pools import group, images, pool_of

MIXES: dict[str, list[GroupSpec]] = {
    "cross": [group(4, 2), images(GroupKind.CROSS, 4, 2)],
    "vision": [group(4, 2), images(GroupKind.VISION, 4, 2)],
    "in pages": [replace(group(4, 2), holds_embeddings=True)],
}
TEXT = [*range(6), *[-5] * 9, *range(20, 26), *[-7] * 4, *range(30, 35)]
ROWS: Ints = np.asarray([[6, 9, 9], [21, 4, 4]], np.int32)
every_mix = pytest.mark.parametrize("mix", MIXES)


def network_of(mix: str) -> Network:
    network = Network(MIXES[mix], 30)
    for name in "ab":
        network.start(name)
    return network


def compute(instance: Instance, tokens: Sequence[int], rows: Ints) -> int:
    """Run a request over a text with images, to its last token; returns its handle."""
    core, asked = instance.core, ints([*tokens, 99])
    handle = core.open(asked, "", images=rows)
    core.claim(handle, len(asked))
    one, until = ints([handle]), ints([len(tokens)])
    served, _ = core.grow(one, until)
    assert served == 1
    for _, index, position, page in core.held_pages(handle).tolist():
        instance.content[index, page] = (index, position)
    core.advance(one, until)
    return handle


def moved(network: Network, handle: int, rows: Ints, *, inserts: bool) -> Transfer:
    """Offer a request's pages, and let everything happen."""
    a = network.instances["a"]
    transfer, actions = a.sending.begin(
        "b", ints([*TEXT, 99]), len(TEXT), 0, 99, inserts=inserts, images=rows
    )
    held = a.core.held_pages(handle)[:, 1:].tolist()
    places = {(index, position): page for index, position, page in held}
    network.act(a, [*actions, *a.sending.ready(transfer, places)])
    for _ in range(9):
        while network.messages:
            network.deliver(0)
        network.copy("b", 0, 99)
    return transfer


@every_mix
@pytest.mark.parametrize("inserts", [True, False])
def test_pages_of_images_come_where_text_goes_on_reading_them(
    mix: str, inserts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(mix)
    a, b = network.instances["a"], network.instances["b"]
    monkeypatch.setattr(network, "taken", lambda *_: None)
    handle = compute(a, TEXT, ROWS)
    transfer = moved(network, handle, ROWS, inserts=inserts)
    assert a.ended == {transfer: ""} and b.arrived == {transfer: len(TEXT)}
    if inserts:
        assert b.core.peek(ints([*TEXT, 99]), "", images=ROWS) == len(TEXT)
        return
    [hold] = b.holds.values()
    pages = b.holds.places(hold.owner)
    assert {b.content[index, page] for (index, _), page in pages.items()} == set(pages)
    of_images = [position for index, position in sorted(pages) if index == 1]
    assert of_images == ([0, 1, 2, 3] if mix == "cross" else [])
    one = ints([b.holds.claim(hold.owner)])
    b.core.claim(int(one[0]), 60)
    assert b.core.grow(one, ints([len(TEXT) + 1]))[0] == 1
    b.core.advance(one, ints([len(TEXT) + 1]))
    b.core.close(int(one[0]))
    b.audit()
    assert not any(b.core.snapshot().used)
    assert b.core.peek(ints([*TEXT, 99, 98]), "", images=ROWS) == len(TEXT) + 1


@every_mix
def test_of_what_is_there_already_nothing_comes_again(mix: str) -> None:
    """Only the half-full page at the end, which is the sender's own."""
    network = network_of(mix)
    a, b = network.instances["a"], network.instances["b"]
    handle = compute(a, TEXT, ROWS)
    b.core.close(compute(b, TEXT[:27], ROWS))
    transfer, [send] = a.sending.begin("b", ints([*TEXT, 99]), len(TEXT), 0, 99, images=ROWS)
    assert isinstance(send, Send) and isinstance(send.message, Prepare)
    [answer] = b.receiving.prepare("a", send.message, 0)
    assert isinstance(answer, Send) and isinstance(answer.message, Prepared)
    missing = np.frombuffer(answer.message.missing, "<i4").reshape(-1, 2).tolist()
    assert missing == [[0, 6], [0, 7]]
    b.receiving.on_abandoned("a", Abandon(transfer, "enough"))
    a.core.close(handle)
    for instance in (a, b):
        assert not any(instance.core.snapshot().used)
        instance.audit()


def prepare_of(network: Network, computed: int, rows: bytes) -> Prepare:
    a = network.instances["a"]
    _, [send] = a.sending.begin("b", ints([*TEXT, 99]), computed, 0, 99)
    assert isinstance(send, Send) and isinstance(send.message, Prepare)
    fields = {name: getattr(send.message, name) for name in send.message.__struct_fields__}
    return Prepare(**(fields | {"images": rows}))


@every_mix
@pytest.mark.parametrize(
    ("computed", "rows", "problem"),
    [
        (30, b"12345678", "no such images"),
        (30, np.asarray([[6, 90, 9]], "<i4").tobytes(), "is outside"),
        (30, np.asarray([[6, 0, 9]], "<i4").tobytes(), "is empty"),
        (30, np.asarray([[21, 4, 4], [6, 9, 9]], "<i4").tobytes(), "overlaps"),
        (8, ROWS.astype("<i4").tobytes(), "cannot receive"),
        (23, ROWS.astype("<i4").tobytes(), "cannot receive"),
    ],
)
def test_images_that_cannot_come_are_refused_with_the_reason(
    mix: str, computed: int, rows: bytes, problem: str
) -> None:
    network = network_of(mix)
    b = network.instances["b"]
    [answer] = b.receiving.prepare("a", prepare_of(network, computed, rows), 0)
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    assert problem in answer.message.why
    assert not len(b.receiving) and not len(b.holds)
    assert not any(b.core.snapshot().used)
    b.audit()


def test_where_text_and_images_share_pages_neither_comes() -> None:
    """No kind of model that is served has such pages."""
    mixed = [replace(group(4, 2), counts_images=True)]
    network = Network(mixed, 30)
    for name in "ab":
        network.start(name)
    rows = ROWS.astype("<i4").tobytes()
    [answer] = network.instances["b"].receiving.prepare("a", prepare_of(network, 30, rows), 0)
    assert isinstance(answer, Send) and isinstance(answer.message, Abandon)
    assert "cannot receive" in answer.message.why
    assert pool_of(30, *mixed).groups == network.instances["b"].core.layout.groups
