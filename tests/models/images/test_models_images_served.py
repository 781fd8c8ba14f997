"""Models of images and text served by the whole engine: the situations that all of them meet."""

import pytest
import torch

from kvell.memory import GroupKind, pool_bytes_for
from tests.models.cases import covering, some_fast
from tests.models.pictures import (
    CROSS,
    EVERY,
    FAST,
    GRIDS,
    GRIDS_2_5,
    IN_TEXT,
    PATCHES,
    PIECES,
    PREFIX,
    Prompt,
    ServedPictures,
    pictured,
    text,
)

FAMILIES = some_fast(EVERY, FAST)
every_family = pytest.mark.parametrize("architecture", FAMILIES)
SMALLEST_STEP = {PATCHES: 23, CROSS: 7, PREFIX: 64, PIECES: 10, GRIDS: 7, GRIDS_2_5: 7}
"""A prompt that reads itself in both directions is computed in one step."""


def some_prompts(architecture: str) -> dict[str, Prompt]:
    return {
        "first": pictured(architecture, 0, text(9)),
        "long text": pictured(architecture, text(60, 1)),
        "before": pictured(architecture, text(13, 2), 1, text(21, 2)),
        "short": pictured(architecture, text(1, 3)),
        "at the end": pictured(architecture, text(30, 4), 2),
        "two": pictured(architecture, text(5, 5), 3, text(8, 5), 1, text(6, 5)),
    }


@every_family
def test_one_request_at_a_time(architecture: str) -> None:
    served = ServedPictures(architecture)
    for seed in range(4):
        served.asked(f"p{seed}", pictured(architecture, text(5 * seed, seed), seed, text(20, seed)))
    served.asked("text", pictured(architecture, text(40)))
    served.check()
    assert served.store.encoder_runs == 4


@covering({"architecture": FAMILIES, "is_small": [False, True]}, together=1)
def test_ragged_batches_and_prefill_in_chunks(architecture: str, is_small: bool) -> None:
    """Small steps cut through pictures, where tokens of them are tokens of the text."""
    served = ServedPictures(architecture, batched=SMALLEST_STEP[architecture] if is_small else 256)
    for name, prompt in some_prompts(architecture).items():
        served.say(name, prompt, outputs=12)
    served.run()
    served.check()


@every_family
def test_pictures_side_by_side(architecture: str) -> None:
    """Text behind them sees all of them; where text stands between, only the last."""
    served = ServedPictures(architecture)
    served.asked("two", pictured(architecture, text(4), 1, 2, text(12)))
    served.asked("three", pictured(architecture, text(4), 3, text(5), 1, 2, text(12)))
    served.check()


@covering({"architecture": FAMILIES, "quarters": [7, 5]}, together=1)
def test_requests_that_are_preempted_and_resume(architecture: str, quarters: int) -> None:
    """Pools for one long request and a part of another: growth runs out of pages.

    :param quarters: of the memory of one request.
    """
    kv_bytes = pool_bytes_for(ServedPictures(architecture).layout, 128, 64) * quarters // 4
    served = ServedPictures(architecture, kv_bytes, max_model_len=112)
    for index in range(8):
        prompt = pictured(architecture, text(6 + index, index), index, text(6, index))
        served.say(f"q{index}", prompt, outputs=36)
    served.run()
    served.check()
    assert sum(a.finished.preemptions for a in served.answers.values() if a.finished)


@every_family
def test_a_neighbour_that_is_cancelled(architecture: str) -> None:
    served = ServedPictures(architecture, batched=SMALLEST_STEP[architecture])
    for seed, name in enumerate(("left", "gone", "right")):
        served.say(name, pictured(architecture, text(9, seed), seed, text(20, seed)), outputs=16)
    for _ in range(6):
        served.step()
    served.cancel("gone")
    served.say("after", pictured(architecture, text(30, 9), 0, text(9, 9)))
    served.run()
    gone = served.answers["gone"].finished
    assert gone is not None
    assert gone.reason == "cancelled"
    assert len(served.answers["left"].output) == 16
    served.check()


@every_family
def test_order_of_execution_changes_no_answer(architecture: str) -> None:
    prompts = some_prompts(architecture)
    outputs = []
    for order in (list(prompts), list(prompts)[::-1]):
        served = ServedPictures(architecture, batched=80)
        for name in order:
            served.say(name, prompts[name])
        served.run()
        served.check()
        outputs.append({name: answer.output for name, answer in served.answers.items()})
    assert outputs[0] == outputs[1]


@covering({"architecture": FAMILIES, "manager": ["jenga", "static", "max-page"]}, together=1)
def test_other_managers(architecture: str, manager: str) -> None:
    served = ServedPictures(architecture, manager=manager)  # type: ignore[arg-type]
    for name, prompt in some_prompts(architecture).items():
        served.say(name, prompt)
    served.run()
    served.check()


@pytest.mark.parametrize("architecture", some_fast([*IN_TEXT, CROSS], FAST))
def test_a_hit_that_contains_an_image_runs_no_encoder(architecture: str) -> None:
    served = ServedPictures(architecture)
    prompt = pictured(architecture, text(10), 0, text(20))
    served.asked("first", prompt)
    again = served.asked("again", Prompt([*prompt.token_ids, *text(9, 1)], prompt.tensors))
    assert again.cached_tokens == len(prompt.token_ids), "hits end at any token"
    assert served.store.encoder_runs == 1
    served.check()


@pytest.mark.parametrize("architecture", some_fast([*IN_TEXT, CROSS], FAST))
def test_the_next_turn_hits_the_last_one(architecture: str) -> None:
    served = ServedPictures(architecture)
    prompt = pictured(architecture, text(10), 0, text(20))
    output = served.asked("first", prompt).output
    known = [*prompt.token_ids, *output]
    turn = pictured(architecture, text(10), 0, [*text(20), *output, *text(5, 3)])
    assert turn.token_ids[: len(known)] == known
    assert served.asked("second", turn).cached_tokens == len(known) - 1
    assert served.store.encoder_runs == 1
    served.check()


def test_a_prompt_read_in_both_directions_is_never_shared() -> None:
    """Every token's keys and values depend on all of it."""
    served = ServedPictures(PREFIX)
    for name, length in (("first", 20), ("same", 20), ("longer", 30)):
        answer = served.asked(name, pictured(PREFIX, 0, text(length)))
        assert answer.cached_tokens == 0
    assert served.store.encoder_runs == 1, "but its embeddings are"
    served.check()


@every_family
def test_equal_text_about_another_image_is_no_hit(architecture: str) -> None:
    served = ServedPictures(architecture)
    first = served.asked("first", pictured(architecture, text(32), 0, text(20)))
    other = pictured(architecture, text(32), 0, text(20))
    other.tensors["pixel_values"] = other.tensors["pixel_values"] + 1.0
    second = served.asked("second", other)
    before = 0 if architecture == PREFIX else 32
    assert second.cached_tokens == before, "the text before the image"
    assert served.store.encoder_runs == 2
    assert first.output != second.output
    served.check()


@every_family
def test_one_pixel_changes_the_output(architecture: str) -> None:
    served = ServedPictures(architecture)
    prompt = pictured(architecture, text(3), 0, text(4))
    changed = Prompt(prompt.token_ids, {**prompt.tensors})
    changed.tensors["pixel_values"] = prompt.tensors["pixel_values"].clone()
    changed.tensors["pixel_values"].view(-1)[77] += 40.0
    one, other = served.asked("one", prompt).logits[0], served.asked("other", changed).logits[0]
    assert (one - other).abs().max() > 1e-3 * one.abs().max()
    served.check()


@every_family
def test_an_early_token_changes_the_output(architecture: str) -> None:
    prompts = [pictured(architecture, [first, *text(4)], 0, text(5)) for first in (7, 8)]
    one, other = (
        ServedPictures(architecture).asked("q", prompt, outputs=1).logits[0] for prompt in prompts
    )
    assert (one - other).abs().max() > 1e-3 * one.abs().max()


def question(architecture: str, before: int, seed: int) -> Prompt:
    """About one image; the family whose prompts are one begins with the image, as it is taught."""
    lead = [] if architecture == PREFIX else [text(before, seed)]
    return pictured(architecture, *lead, 0, text(20, seed))


@every_family
def test_the_same_image_in_two_requests_is_encoded_once(architecture: str) -> None:
    """In one step; and later, while its embeddings survive."""
    served = ServedPictures(architecture)
    served.say("one", question(architecture, 6, 1))
    served.say("other", question(architecture, 9, 2))
    served.run()
    assert served.store.encoder_runs == 1
    served.say("later", question(architecture, 12, 3))
    served.run()
    in_pool = any(g.kind is GroupKind.VISION for g in served.layout.groups)
    assert served.store.encoder_runs == (1 if in_pool else 2)
    served.check()


@every_family
def test_the_encoder_runs_once_over_a_prefill_in_chunks(architecture: str) -> None:
    served = ServedPictures(architecture, batched=SMALLEST_STEP[architecture])
    served.asked("long", pictured(architecture, text(10), 0, text(30)))
    assert served.store.encoder_runs == 1
    served.check()


@every_family
def test_what_stands_in_a_page_decides_the_output(architecture: str) -> None:
    """Whatever group it is of: text, image tokens attended to, windows."""
    prompt = pictured(architecture, text(6), 0, text(12))
    groups = range(len(ServedPictures(architecture).layout.groups))
    for group in (g for g in groups if not _is_consumed(architecture, g)):
        last = []
        for tamper in (False, True):
            served = ServedPictures(architecture)
            served.say("q", prompt, outputs=2)
            served.step()
            if tamper:
                holder = served.engine.core.memory.snapshot().holders[0]
                page = holder.groups[group][1][0]
                served.page_bytes(group, page).view(torch.float32).mul_(-3.0)
            served.run()
            last.append(served.answers["q"].logits[-1])
        assert (last[0] - last[1]).abs().max() > 1e-3 * last[0].abs().max(), group


def _is_consumed(architecture: str, group: int) -> bool:
    return ServedPictures(architecture).layout.groups[group].kind == "vision"
