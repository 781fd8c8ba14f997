"""Requests with images that move between two real engines, over every family of image models."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Cancel, Tokens
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.running import moved_images
from kvell.memory import GroupKind, pool_bytes_for
from kvell.mempool.rendezvous import PD_CACHINGS, PageTransport, PdCaching
from kvell.models.images.image_store import ImageStore
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.engine.seen import content_ids_of, spans_of
from tests.models.cases import covering, some_fast
from tests.models.pictures import (
    CROSS,
    EVERY,
    FAST,
    GRIDS,
    IN_TEXT,
    PATCHES,
    PREFIX,
    Prompt,
    pictured,
    text,
)
from tests.models.serving.pairs import GREEDY, SEEDED, Pair, closed_after, places_in
from tests.models.serving.picture_pairs import engine_of, submit_of

SAMPLING = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]
FAMILIES = some_fast(EVERY, FAST)
every_family = pytest.mark.parametrize("architecture", FAMILIES)


def some_prompts(architecture: str) -> dict[str, Prompt]:
    """Long and short ones, with pictures and without."""
    return {
        "first": pictured(architecture, 0, text(9)),
        "text": pictured(architecture, text(33, 1)),
        "before": pictured(architecture, text(13, 2), 1, text(21, 2)),
        "at the end": pictured(architecture, text(30, 4), 2),
        "two": pictured(architecture, text(5, 5), 3, text(8, 5), 4, text(6, 5)),
    }


class PicturePair(Pair):
    """Two engines, and what either said of each request, also of those with pictures."""

    def give(self, name: str, prompt: Prompt, at: int, params: SamplingParams, **more: str) -> None:
        self.tokens[name] = []
        command = submit_of(name, prompt, params, **{"goes_to": "ab"[1 - at]} | more)
        self.take(self.engines[at].handle(command))

    @override
    def holds(self) -> bool:
        return super().holds() or any(
            engine.has_work() or spans_of(store_of(engine)) for engine in self.engines
        )

    @override
    def check_pools(self) -> None:
        super().check_pools()
        assert not any(spans_of(store_of(engine)) for engine in self.engines)


def store_of(engine: Engine) -> ImageStore:
    assert engine.images is not None
    return engine.images


@contextmanager
def pair_of(
    architecture: str,
    folder: Path,
    sizes: Sequence[int] = (8 * MIB, 8 * MIB),
    transport: PageTransport = "memory",
    pd_caching: PdCaching = 3,
    **more: Any,
) -> Iterator[PicturePair]:
    places = places_in(folder, "ab", transport=transport, pd_caching=pd_caching)
    engines = [
        engine_of(architecture, size, pool_place=place, **more)
        for place, size in zip(places, sizes, strict=True)
    ]
    with closed_after(engines):
        yield PicturePair(engines)


def alone(
    architecture: str, prompts: Mapping[str, Prompt], params: SamplingParams, **more: Any
) -> dict[str, list[int]]:
    engine = engine_of(architecture, **more)
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        assert is_accepted(engine.handle(submit_of(name, prompt, params)))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.request_id].extend(event.token_ids)
    return found


_some: dict[tuple[str, str], dict[str, list[int]]] = {}


def some_answers(architecture: str, params: SamplingParams) -> dict[str, list[int]]:
    """What one engine answers to some prompts, asked once for all tests."""
    key = architecture, repr(params)
    if key not in _some:
        _some[key] = alone(architecture, some_prompts(architecture), params)
    return _some[key]


@covering({"architecture": FAMILIES, "params": SAMPLING}, together=1)
def test_answers_are_those_of_one_engine(
    architecture: str, params: SamplingParams, tmp_path: Path
) -> None:
    """In both directions at once; the second round finds the first one's pages on both sides."""
    prompts, expected = some_prompts(architecture), some_answers(architecture, params)
    with pair_of(architecture, tmp_path) as pair:
        encoded = []
        for turn in range(2):
            for at, (name, prompt) in enumerate(prompts.items()):
                pair.give(f"{name}/{turn}", prompt, at % 2, params)
            pair.run()
            assert {name: pair.tokens[f"{name}/{turn}"] for name in prompts} == expected
            encoded.append([store_of(engine).encoder_runs for engine in pair.engines])
        assert set(pair.moved) == set(pair.tokens)
        pair.check_pools()
        cached = {name: pair.ends[f"{name}/1"].cached_tokens for name in prompts}
    assert sum(encoded[0]) == 5, "each image once, where its prompt is computed"
    assert cached["text"] > 0
    if architecture in (*IN_TEXT, CROSS):
        assert min(cached.values()) > 0
        # One that ends with the only token of its image attends to it once more.
        again = 1 if architecture == CROSS else 0
        assert sum(encoded[1]) == sum(encoded[0]) + again, "the second round is hit"


@covering(
    {"architecture": FAMILIES, "pd_caching": PD_CACHINGS, "transport": ["memory", "tcp"]},
    together=1,
)
def test_in_every_mode_over_every_transport(
    architecture: str, pd_caching: PdCaching, transport: PageTransport, tmp_path: Path
) -> None:
    prompts, expected = some_prompts(architecture), some_answers(architecture, GREEDY)
    with pair_of(architecture, tmp_path, transport=transport, pd_caching=pd_caching) as pair:
        for turn in range(2):
            for name, prompt in prompts.items():
                pair.give(f"{name}/{turn}", prompt, 0, GREEDY)
            pair.run()
            assert {name: pair.tokens[f"{name}/{turn}"] for name in prompts} == expected
        assert set(pair.moved) == set(pair.tokens)
        assert (pair.ends["text/1"].cached_tokens > 0) == (pd_caching > 0)
        pair.check_pools()


@pytest.mark.parametrize("architecture", some_fast(EVERY, FAST[:1]))
def test_a_preemption_where_it_goes_on(architecture: str, tmp_path: Path) -> None:
    """The pool there is small: what has come is computed again, images too, exactly."""
    params = replace(GREEDY, max_tokens=60)
    prompts = {
        f"q{index}": pictured(architecture, text(6 + index, index), index, text(6, index))
        for index in range(8)
    }
    expected = alone(architecture, prompts, params, max_model_len=112)
    layout = engine_of(architecture).core.memory.layout
    small = pool_bytes_for(layout, 128, 64) * 7 // 4
    # Where the large page depends on the pool's size, pools must be equal.
    here = small if architecture == PREFIX else 8 * MIB
    with pair_of(architecture, tmp_path, (here, small), max_model_len=112) as pair:
        for name, prompt in prompts.items():
            pair.give(name, prompt, 0, params)
        pair.run()
        assert pair.tokens == expected
        there = pair.engines[1]
        assert len(pair.moved) > 1 and there.core.stats().preemptions
        assert store_of(there).encoder_runs, "an image was computed again there"
        pair.check_pools()


@every_family
def test_a_request_that_is_cancelled_on_its_way_leaves_nothing(
    architecture: str, tmp_path: Path
) -> None:
    """Before it has moved, and after."""
    prompt = pictured(architecture, text(13, 2), 1, text(21, 2))
    with pair_of(architecture, tmp_path) as pair:
        pair.give("early", prompt, 0, GREEDY)
        pair.take(pair.engines[0].handle(Cancel(RequestId("early"))))
        pair.run()
        assert pair.ends["early"].reason == "cancelled" and not pair.moved
        pair.give("late", prompt, 0, replace(GREEDY, max_tokens=200))
        pair.run(lambda: len(pair.tokens["late"]) >= 3 and bool(pair.moved))
        assert pair.moved == ["late"]
        assert spans_of(store_of(pair.engines[1]))
        pair.take(pair.engines[1].handle(Cancel(RequestId("late"))))
        pair.run()
        assert pair.ends["late"].reason == "cancelled"
        pair.check_pools()


@pytest.mark.parametrize("architecture", [PATCHES, CROSS])
def test_an_id_that_stands_for_another_image_there_stays(architecture: str, tmp_path: Path) -> None:
    """It would hit pages of the other image: so the request is served where it is."""
    prompts = {"one": pictured(architecture, text(9, 1), 1, text(21, 2))}
    expected = alone(architecture, prompts, GREEDY)
    with pair_of(architecture, tmp_path) as pair:
        here, there = (store_of(engine) for engine in pair.engines)
        ids = np.asarray(prompts["one"].token_ids, np.int32)
        told = here.take(ids, prompts["one"].tensors)
        here.release(told)
        content = int(told.token_ids[told.images[0][0]])
        another = (-1 - content << 1).to_bytes(4, "little") + bytes(12)
        assert content_ids_of(there).id_of(another) == content
        pair.give("one", prompts["one"], 0, GREEDY)
        pair.run()
        assert pair.tokens == expected and not pair.moved
        other = {"other": pictured(architecture, text(9, 1), 3, text(21, 2))}
        pair.give("other", other["other"], 0, GREEDY)
        pair.run()
        assert pair.moved == ["other"]
        assert pair.tokens["other"] == alone(architecture, other, GREEDY)["other"]
        pair.check_pools()


def test_images_too_large_to_be_sent_along_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, expected = some_prompts(GRIDS), some_answers(GRIDS, GREEDY)
    size = sum(
        tensor.numel() * tensor.element_size() for tensor in prompts["first"].tensors.values()
    )
    monkeypatch.setattr(moved_images, "MOST_BYTES", size)
    with pair_of(GRIDS, tmp_path) as pair:
        for name, prompt in prompts.items():
            pair.give(name, prompt, 0, GREEDY)
            pair.run()
        assert pair.tokens == expected
        assert {"first", "text"} <= set(pair.moved) and "two" not in pair.moved
        for name, prompt in prompts.items():  # together: what would be too much stays
            pair.give(f"{name}/2", prompt, 0, GREEDY)
        pair.run()
        assert {name: pair.tokens[f"{name}/2"] for name in prompts} == expected
        pair.check_pools()


@pytest.mark.parametrize("architecture", [PATCHES, CROSS])
def test_only_pages_of_cross_groups_move_beside_those_of_text(
    architecture: str, tmp_path: Path
) -> None:
    """Embeddings have been read by then: the receiver gets no page for them."""
    prompt = pictured(architecture, text(13, 2), 1, text(21, 2))
    with pair_of(architecture, tmp_path) as pair:
        there = pair.engines[1].core.memory
        pair.give("one", prompt, 0, replace(GREEDY, max_tokens=60))
        pair.run(lambda: len(pair.tokens["one"]) >= 2)
        [holder] = [h for h in there.snapshot().holders if not h.is_lease]
        kinds = [group.kind for group in there.layout.groups]
        held = {kind: len(pages) for kind, (_, pages) in zip(kinds, holder.groups, strict=True)}
        assert held.get(GroupKind.VISION, 0) == 0
        assert (held.get(GroupKind.CROSS, 0) > 0) == (architecture == CROSS)
        pair.run()
        assert store_of(pair.engines[1]).encoder_runs == 0
        pair.check_pools()


@every_family
def test_a_request_leaves_in_the_middle_of_its_answer(architecture: str, tmp_path: Path) -> None:
    """Its text is copied while it goes on; pages of images come with what is left."""
    prompts = {"one": pictured(architecture, text(13, 2), 1, text(21, 2))}
    params = replace(GREEDY, max_tokens=100)
    expected = alone(architecture, prompts, params)
    with pair_of(architecture, tmp_path) as pair:
        there = pair.engines[1]
        pair.give("one", prompts["one"], 0, params, goes_to="")
        pair.run(lambda: len(pair.tokens["one"]) >= 5)
        pair.migrate("one", 0, "b")
        pair.run()
        assert pair.moved == ["one"] and pair.tokens == expected
        assert there.core.stats().output_tokens > 20
        assert store_of(there).encoder_runs == 0
        pair.check_pools()


@every_family
def test_what_another_instance_has_of_a_prompt_is_fetched(
    architecture: str, tmp_path: Path
) -> None:
    """Text up to the image is no image's; what shows it is told by its ids on both sides."""
    prompts = {"one": pictured(architecture, text(40, 2), 1, text(31, 2))}
    expected = alone(architecture, prompts, GREEDY)
    with pair_of(architecture, tmp_path) as pair:
        second = pair.engines[1]
        pair.give("one", prompts["one"], 0, GREEDY, goes_to="")
        pair.run()
        pair.give("again", prompts["one"], 1, GREEDY, goes_to="", pulls_from="a")
        pair.run()
        assert pair.tokens["one"] == pair.tokens["again"] == expected["one"]
        cached = pair.ends["again"].cached_tokens
        length = len(prompts["one"].token_ids)
        if architecture in IN_TEXT:
            assert cached == length - 1 and store_of(second).encoder_runs == 0
        elif architecture == CROSS:
            assert cached == 40, "pages of images are not copied to be cached"
        else:
            assert cached == 0, "a prompt that reads itself in both directions"
        pair.check_pools()
