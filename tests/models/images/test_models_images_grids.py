"""Positions of rows and columns: transformers' own index, and what depends on it when served."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kvell.engine.running.batching import Ints
from kvell.memory import pool_bytes_for
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.images.image_families import FAMILIES
from kvell.models.images.image_grids import Grid, grid_positions
from kvell.models.paged_model import ForwardBatch
from tests.models.cases import some_fast
from tests.models.pictures import (
    GRIDS,
    GRIDS_2_5,
    KINDS,
    Prompt,
    ServedPictures,
    picture_module,
    pictured,
    text,
)

both = pytest.mark.parametrize("architecture", some_fast([GRIDS, GRIDS_2_5], [GRIDS_2_5]))


def prompts() -> list[Prompt]:
    """Wide, tall, square and single pictures, first, last and between texts."""
    parts: list[list[Sequence[int] | int]] = [
        [text(7), 0, text(9)],
        [0, 1, 2, text(3)],
        [text(4), 2, text(5), 3, text(6), 4, text(1)],
        [text(2), 3],
    ]
    return [pictured(GRIDS, *part) for part in parts]


def index_of(prompt: Prompt, output: Sequence[int] = ()) -> Any:
    """transformers' own: [3, tokens]; generation goes on from the last one."""
    ids = torch.tensor([[*prompt.token_ids, *output]])
    module = picture_module(GRIDS)
    positions, _ = module.model.get_rope_index(
        ids, (ids == module.config.image_token_id).int(), prompt.tensors["image_grid_thw"]
    )
    return positions[:, 0].numpy()


def grids_of(prompt: Prompt) -> list[Grid]:
    family = FAMILIES[KINDS[GRIDS]](picture_module(GRIDS))
    images = family.read_images(prompt.tensors)
    spans = family.spans(np.asarray(prompt.token_ids, np.int32), images)
    shapes = [image.grid for image in images if image.grid]
    return [Grid(at, *shape) for (at, _), shape in zip(spans, shapes, strict=True)]


@pytest.mark.parametrize("number", range(4))
def test_positions_are_transformers_index(number: int) -> None:
    prompt = prompts()[number]
    output = text(9, 8)
    grids, total = grids_of(prompt), len(prompt.token_ids) + len(output)
    assert np.array_equal(grid_positions(0, total, grids), index_of(prompt, output))


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_wherever_a_step_begins_and_ends_they_are_the_same(step: int) -> None:
    """Inside pictures, between them, and far behind them."""
    for prompt in prompts():
        grids, total = grids_of(prompt), len(prompt.token_ids) + 7
        cuts = [*range(0, total, step), total]
        pieces = [grid_positions(low, high - low, grids) for low, high in pairwise(cuts)]
        assert np.array_equal(np.concatenate(pieces, axis=1), grid_positions(0, total, grids))


def test_text_alone_counts_its_tokens() -> None:
    assert grid_positions(5, 3, []).tolist() == [[5, 6, 7]] * 3
    assert grid_positions(5, 3, [Grid(8, 2, 3)]).tolist() == [[5, 6, 7]] * 3


def test_the_example_that_is_drawn() -> None:
    assert grid_positions(0, 11, [Grid(3, 2, 3)]).tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]


class Watched(ServedPictures):
    """Knows the positions that each step was given, as the model's decoder takes them."""

    def __init__(self, architecture: str, **options: Any) -> None:
        super().__init__(architecture, **options)
        self.positions: list[Ints] = []
        forward = self.recorder.model.forward

        def watching(batch: ForwardBatch, *seams: LayerCallbacks | None) -> torch.Tensor:
            given = batch.images.positions if batch.images is not None else None
            self.positions.append(
                (batch.positions.expand(3, -1) if given is None else given).numpy()
            )
            return forward(batch, *seams)

        self.recorder.model.forward = watching  # type: ignore[method-assign,assignment]


@both
@pytest.mark.parametrize("batched", [3, 256])
def test_a_request_alone_is_given_its_index(architecture: str, batched: int) -> None:
    """In chunks or at once, and in every step of decoding."""
    for prompt in prompts():
        served = Watched(architecture, batched=batched)
        answer = served.asked("q", prompt, outputs=6)
        given = np.concatenate(served.positions, axis=1)
        assert np.array_equal(given, index_of(prompt, answer.output[:-1]))
        served.check()


@both
def test_after_a_hit_positions_go_on_behind_the_images_that_were_hit(architecture: str) -> None:
    """The step computes none of their tokens, and yet its positions depend on them."""
    served = Watched(architecture)
    prompt = pictured(architecture, text(10), 0, text(4), 3, text(20))
    served.asked("first", prompt)
    served.positions.clear()
    longer = Prompt([*prompt.token_ids, *text(9, 1)], prompt.tensors)
    again = served.asked("again", longer, outputs=4)
    assert again.cached_tokens == len(prompt.token_ids)
    given = np.concatenate(served.positions, axis=1)
    assert np.array_equal(given, index_of(longer, again.output[:-1])[:, again.cached_tokens :])
    assert given.min() < again.cached_tokens, "or the images would not have mattered"
    served.check()


@both
def test_a_hit_ends_inside_the_text_between_two_images(architecture: str) -> None:
    """One image was hit, another takes the place of the second, of another shape."""
    served = Watched(architecture)
    served.asked("first", pictured(architecture, text(10), 0, text(20), 3, text(8)))
    other = pictured(architecture, text(10), 0, text(20), 2, text(8))
    answer = served.asked("other", other)
    assert 30 < answer.cached_tokens < len(other.token_ids)
    assert served.store.encoder_runs == 3
    served.check()


@both
def test_the_shape_of_an_image_moves_the_text_after_it(architecture: str) -> None:
    """Equal numbers of tokens, other positions: other logits far behind."""
    rows = []
    for grid in ([1, 4, 6], [1, 2, 12]):
        served = Watched(architecture)
        prompt = pictured(architecture, text(5), 0, text(20))
        prompt.tensors["image_grid_thw"] = torch.tensor([grid])
        rows.append(served.asked("q", prompt).logits[0])
        served.check()
    assert (rows[0] - rows[1]).abs().max() > 1e-3 * rows[0].abs().max()


@both
def test_preempted_in_the_middle_of_an_answer(architecture: str) -> None:
    """Computed once more, prompt and output together: images of shapes of their own."""
    layout = ServedPictures(architecture).layout
    served = ServedPictures(architecture, pool_bytes_for(layout, 128, 64) * 5 // 4, 256, 112)
    for seed in range(6):
        prompt = pictured(architecture, text(5, seed), seed, text(3, seed), seed + 1, text(4, seed))
        served.say(f"q{seed}", prompt, outputs=40)
    served.run()
    served.check()
    finished = [a.finished for a in served.answers.values() if a.finished]
    assert sum(end.preemptions for end in finished)


@both
def test_requests_with_and_without_images_share_steps(architecture: str) -> None:
    served = ServedPictures(architecture, batched=16)
    served.say("text", Prompt(text(40, 1)), outputs=20)
    served.say("picture", pictured(architecture, text(3), 3, text(9)), outputs=20)
    served.say("two", pictured(architecture, 2, text(9), 0, text(2)), outputs=20)
    served.run()
    served.check()
