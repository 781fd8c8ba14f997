"""Which requests are served where their prompts are computed, and why."""

from dataclasses import replace
from typing import Any

import pytest

from kvell.engine.moving.handovers import staying_reason
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec
from tests.engine.works import spec_of
from tests.pages.pools import Chunk, dropping, group, images, state

TEXT = SamplingParams(temperature=0)
ROWS = ((2, 3, 3),)


def request_of(params: SamplingParams = TEXT, **more: Any) -> Request:
    return Request(spec_of([1, 2, -3, -3, -3, 4], params, **more), 0, 9, "")


@pytest.mark.parametrize(
    "groups",
    [
        [group(4, 2)],
        [group(4, 2), group(4, 1, window=9), group(4, 1, window=Chunk(8)), state(1, 2)],
        [group(4, 2), images(GroupKind.CROSS, 4, 2)],
        [group(4, 2), images(GroupKind.VISION, 4, 2)],
        [replace(group(4, 2), holds_embeddings=True)],
        [group(4, 2), replace(group(4, 2), is_draft=True)],
    ],
)
def test_requests_move_with_their_images_and_without(groups: list[GroupSpec]) -> None:
    assert staying_reason(request_of(), groups) == ""
    assert staying_reason(request_of(images=ROWS), groups) == ""


@pytest.mark.parametrize(
    ("request_", "groups", "reason"),
    [
        (request_of(), [group(4, 2), dropping(4, 2, 12)], "pages that cannot be moved"),
        (request_of(replace(TEXT, prompt_logprobs=1)), [group(4, 2)], "its prompt logprobs"),
        (request_of(pooling="last"), [group(4, 2)], "it generates no tokens"),
        (
            request_of(images=ROWS),
            [replace(group(4, 2), counts_images=True)],
            "its pages hold images among the text",
        ),
    ],
)
def test_what_stays_has_its_reason(request_: Request, groups: list[GroupSpec], reason: str) -> None:
    assert reason in staying_reason(request_, groups)


def test_only_groups_of_its_own_model_decide() -> None:
    other = replace(dropping(4, 2, 12), model="other")
    assert staying_reason(request_of(), [group(4, 2), other]) == ""
    assert staying_reason(request_of(model="other"), [group(4, 2), other]) != ""
    mixed = replace(group(4, 2), counts_images=True)
    assert staying_reason(request_of(), [mixed]) == "", "text alone moves"
