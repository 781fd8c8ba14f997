"""Latent, chunked and shared attention served by the whole engine: the seven situations."""

import pytest
import torch

from kvell.memory import pool_bytes_for
from tests.models.attention_variants import VARIANTS
from tests.models.harness import prompt_ids
from tests.models.served import Served, assert_answer, error, layout_of

every_family = pytest.mark.parametrize("architecture", sorted(VARIANTS))
PAGE_TOKENS = 16


def assert_all(served: Served) -> None:
    for answer in served.answers.values():
        assert_answer(served.architecture, answer)
    outputs = [token for answer in served.answers.values() for token in answer.output]
    assert len(set(outputs)) > len(outputs) // 4, "answers that repeat themselves prove nothing"


@every_family
def test_one_request(architecture: str) -> None:
    served = Served(architecture)
    served.ask("a", prompt_ids(120), outputs=20)
    assert_all(served)


@every_family
@pytest.mark.parametrize("batched", [256, 23])
def test_ragged_batches_and_prefill_in_chunks(architecture: str, batched: int) -> None:
    served = Served(architecture, batched=batched)
    for length in (3, 90, 1, 64, 101):
        served.submit(f"q{length}", prompt_ids(length), outputs=12)
    served.run()
    assert_all(served)


@every_family
def test_requests_that_are_preempted_and_resume(architecture: str) -> None:
    """Pools for one long request and a part of another: growth runs out of pages."""
    need_bytes, preemptions = pool_bytes_for(layout_of(architecture), 96, 64), 0
    for kv_bytes in (need_bytes * 5 // 4, need_bytes * 3 // 2):
        served = Served(architecture, kv_bytes, max_model_len=96)
        for index in range(6):
            served.submit(f"q{index}", prompt_ids(20 + index, seed=index), outputs=40)
        served.run()
        assert_all(served)
        preemptions += sum(a.finished.preemptions for a in served.answers.values() if a.finished)
    assert preemptions > 0


@every_family
def test_a_neighbour_that_is_cancelled(architecture: str) -> None:
    served = Served(architecture, batched=40)
    prompts = {name: prompt_ids(60, seed=i) for i, name in enumerate(("left", "gone", "right"))}
    for name, prompt in prompts.items():
        served.submit(name, prompt, outputs=16)
    for _ in range(6):
        served.step()
    served.cancel("gone")
    served.submit("after", prompt_ids(50, seed=9))
    served.run()
    gone = served.answers["gone"].finished
    assert gone is not None
    assert gone.reason == "cancelled"
    assert len(served.answers["left"].output) == 16
    assert_all(served)


@every_family
def test_order_of_execution_changes_no_answer(architecture: str) -> None:
    prompts = {f"q{length}": prompt_ids(length) for length in (17, 70, 33, 100)}
    outputs = []
    for order in (list(prompts), list(prompts)[::-1]):
        served = Served(architecture, batched=64)
        for name in order:
            served.submit(name, prompts[name])
        served.run()
        assert_all(served)
        outputs.append({name: answer.output for name, answer in served.answers.items()})
    assert outputs[0] == outputs[1]


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
