"""Latent, chunked and shared attention served by the whole engine: hits, and damaged pages."""

import pytest
import torch

from tests.models.attention_variants import VARIANTS
from tests.models.cases import families
from tests.models.harness import prompt_ids
from tests.models.served import Served, assert_all, error

every_family = pytest.mark.parametrize("architecture", families(VARIANTS))
PAGE_TOKENS = 16


@every_family
def test_a_shared_prefix_is_hit_to_its_last_token(architecture: str) -> None:
    shared, served = prompt_ids(100), Served(architecture)
    assert {group.page_tokens for group in served.layout.groups} == {PAGE_TOKENS}
    hits = [served.ask(f"q{i}", shared + prompt_ids(20, seed=i)).cached_tokens for i in range(3)]
    assert hits == [0, 100, 100], "the page that is shared in part is copied"
    assert_all(served)


@every_family
def test_a_damaged_page_of_any_group_changes_the_answer(architecture: str) -> None:
    """What was hit is what the page says: this test sees that the others could fail."""
    shared = prompt_ids(96)
    for group in range(len(Served(architecture).layout.groups)):
        served = Served(architecture)
        served.ask("first", shared + prompt_ids(20))
        last = [
            entry
            for entry in served.engine.core.memory.snapshot().index
            if entry.group == group and entry.end == 96
        ]
        assert len(last) == 1
        page = served.page_bytes(group, last[0].page).view(torch.float32)
        page.copy_(page.roll(64))
        answer = served.ask("second", shared + prompt_ids(20, seed=1))
        assert answer.cached_tokens == 96
        assert not error(architecture, answer) <= 1e-3, "not a number is an error too"
