"""Families with states, served by the whole engine: seven situations, and where hits lie."""

import pytest

from kvell.memory import GroupKind, Manager, pool_bytes_for
from tests.models.harness import STATES, prompt_ids
from tests.models.served import Served, assert_answer, error, layout_of

every_family = pytest.mark.parametrize("architecture", sorted(STATES))


def has_attention(architecture: str) -> bool:
    return any(group.kind is not GroupKind.STATE for group in layout_of(architecture).groups)


def aligned(architecture: str, length: int) -> int:
    """A branch's state is kept where pages of attention end too."""
    return length // 16 * 16 if has_attention(architecture) else length


def assert_all(served: Served) -> None:
    for answer in served.answers.values():
        assert_answer(served.architecture, answer)
    outputs = [token for answer in served.answers.values() for token in answer.output]
    assert len(set(outputs)) > len(outputs) // 4, "answers that repeat themselves prove nothing"


@every_family
def test_one_request_at_a_time(architecture: str) -> None:
    served = Served(architecture)
    for length in (150, 31, 64):
        served.ask(f"q{length}", prompt_ids(length))
    assert_all(served)


@every_family
@pytest.mark.parametrize("batched", [256, 23])
def test_ragged_batches_and_prefill_in_chunks(architecture: str, batched: int) -> None:
    served = Served(architecture, batched=batched)
    for length in (3, 90, 1, 64, 131):
        served.submit(f"q{length}", prompt_ids(length), outputs=12)
    served.run()
    assert_all(served)


@every_family
def test_requests_that_are_preempted_and_resume(architecture: str) -> None:
    """Pools for one long request, and for half of another: growth runs out of pages.

    States alone do not grow: who was admitted stays.
    """
    need_bytes, preemptions = pool_bytes_for(layout_of(architecture), 96, 64), 0
    for kv_bytes in (need_bytes, need_bytes * 3 // 2):
        served = Served(architecture, kv_bytes, max_model_len=96)
        for index in range(12):
            served.submit(f"q{index}", prompt_ids(20 + index, seed=index), outputs=40)
        served.run()
        assert_all(served)
        preemptions += sum(a.finished.preemptions for a in served.answers.values() if a.finished)
    assert (preemptions > 0) == has_attention(architecture)


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
def test_a_request_that_shares_a_hundred_tokens_hits_sixty_four(architecture: str) -> None:
    """States are kept at 64 tokens; the branch at 100 is kept by the one that finds it."""
    shared, served = prompt_ids(100), Served(architecture)
    hits = [served.ask(f"q{i}", shared + prompt_ids(40, seed=i)).cached_tokens for i in range(3)]
    assert hits == [0, 64, aligned(architecture, 100)]
    assert_all(served)


@every_family
@pytest.mark.parametrize("batched", [256, 37])
def test_the_next_turn_hits_all_of_the_last_one(architecture: str, batched: int) -> None:
    """The state stays where it is, the half full page of attention is copied."""
    served = Served(architecture, batched=batched)
    known = prompt_ids(83)
    hits = []
    for turn in range(3):
        answer = served.ask(f"turn{turn}", known, outputs=9)
        hits.append(answer.cached_tokens)
        known = known + answer.output + prompt_ids(11, seed=turn)
    ends = [83 + 20 * turn + 9 - 1 for turn in range(2)]
    assert hits == [0, *ends], "all that was computed: the last token was only sampled"
    assert_all(served)


@every_family
def test_requests_resume_side_by_side_from_one_state(architecture: str) -> None:
    """A checkpoint is copied, not used up."""
    shared, served = prompt_ids(100), Served(architecture, batched=50)
    served.ask("first", shared + prompt_ids(20))
    for i in range(4):
        served.submit(f"q{i}", shared[:70] + prompt_ids(10 + i, seed=i), outputs=10)
    served.run()
    branch = aligned(architecture, 70)
    assert [served.answers[f"q{i}"].cached_tokens for i in range(4)] == [64, *[branch] * 3]
    assert_all(served)


@pytest.mark.parametrize("manager", ["jenga", "paged", "max-page", "static"])
@pytest.mark.parametrize("architecture", ["FalconH1ForCausalLM", "Qwen3NextForCausalLM"])
def test_every_manager_of_memory_gives_the_same_hits(architecture: str, manager: Manager) -> None:
    """States in slices, in pages of their own size and in padded ones."""
    shared, served = prompt_ids(100), Served(architecture, manager=manager)
    hits = [served.ask(f"q{i}", shared + prompt_ids(30, seed=i)).cached_tokens for i in range(3)]
    assert hits == [0, 64, 96]
    assert_all(served)


@every_family
def test_a_damaged_checkpoint_changes_the_answer(architecture: str) -> None:
    """What is resumed is what the page says: this test sees that the others could fail."""
    shared, served = prompt_ids(64), Served(architecture)
    served.ask("first", shared + prompt_ids(20))
    snapshot = served.engine.core.memory.snapshot()
    states = [g for g, spec in enumerate(served.layout.groups) if spec.kind is GroupKind.STATE]
    kept = [entry for entry in snapshot.index if entry.group in states and entry.end == 64]
    assert len(kept) == served.layout.groups[states[0]].slices
    for entry in kept:
        page = served.page_bytes(entry.group, entry.page)
        page.copy_(page.roll(64))
    answer = served.ask("second", shared + prompt_ids(20, seed=1))
    assert answer.cached_tokens == 64
    assert not error(architecture, answer) <= 1e-3, "not a number is an error too"
