"""Whole engines whose layers keep a budget of long prompts, against an explicit mask."""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.protocol.messages import Tokens
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, Manager, pool_bytes_for
from kvell.models.config.budgets import budgets_of, with_budgets
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models.cases import covering, some_fast
from tests.models.harness import SMALL, tiny_module
from tests.models.served import MAX_MODEL_LEN, Answer, Recorder, Served, error, oracle_rows

NAME = "kvell_dropping_oracle"
OBSERVING, POOLED = 8, 7


@dataclass
class Oracle:
    """One prompt and what its layers keep."""

    architecture: str
    budgets: Mapping[int, int]
    kept: dict[int, list[list[int]]] = field(default_factory=dict)
    """By layer, for each head: positions of the prompt that stay."""

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Before each output token: [outputs, vocab]."""
        AttentionInterface.register(NAME, self._attend)
        module = copy.deepcopy(tiny_module(self.architecture))
        module.set_attn_implementation(NAME)
        self._prompt_tokens = len(prompt)
        with torch.inference_mode():
            known = torch.tensor([[*prompt, *output]])
            logits: torch.Tensor = module(known, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        k, v = (x[0].repeat_interleave(group, 0) for x in (key, value))
        scores = query[0] @ k.transpose(1, 2) * (scaling or query.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        readable = self._causal(query.shape[2], sliding_window)
        plain = _weights(scores.masked_fill(~readable, -torch.inf), s_aux)
        source = getattr(module, "kv_shared_layer_index", None)
        layer = int(module.layer_idx if source is None else source)
        budget = self.budgets.get(layer)
        if budget is None or budget >= self._prompt_tokens:
            return (plain @ v).transpose(0, 1)[None], None
        # Latents are expanded to a head for each query head, but stored, and kept, as one.
        heads = 1 if hasattr(module, "kv_lora_rank") else key.shape[1]
        if source is None:
            self.kept[layer] = self._choose(plain, heads, budget)
        kept = self.kept[layer]
        allowed = readable.expand(len(scores), -1, -1).clone()
        for head, positions in enumerate(kept):
            gone = [j for j in range(self._prompt_tokens) if j not in positions]
            own = slice(head * len(scores) // heads, (head + 1) * len(scores) // heads)
            allowed[own, self._prompt_tokens :, gone] = False
        dropped = _weights(scores.masked_fill(~allowed, -torch.inf), s_aux)
        return (dropped @ v).transpose(0, 1)[None], None

    def _causal(self, tokens: int, window: int | None) -> torch.Tensor:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        return (distance >= 0) & (distance < (window or tokens + 1))

    def _choose(self, weights: torch.Tensor, heads: int, budget: int) -> list[list[int]]:
        end = self._prompt_tokens
        paid = weights[:, end - OBSERVING : end, :end].sum(1)
        return [_best(votes, budget) for votes in paid.view(heads, -1, end).sum(1).tolist()]


def _best(votes: list[float], budget: int) -> list[int]:
    """The best by the largest vote around, the earlier of equals; and all that observe."""
    earlier, reach = len(votes) - OBSERVING, POOLED // 2
    around = [max(votes[max(0, j - reach) : min(earlier, j + reach + 1)]) for j in range(earlier)]
    best = sorted(range(earlier), key=lambda j: (-around[j], j))[: budget - OBSERVING]
    return sorted(best) + list(range(earlier, len(votes)))


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    columns = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, columns], -1).softmax(-1)[..., :-1]


FAMILIES = [
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "GptOssForCausalLM",
    "JambaForCausalLM",
    "LlamaForCausalLM",
]
"""A latent; soft caps and windows; shared keys and values; sinks; states; grouped heads."""
LLAMA = "LlamaForCausalLM"
FAST = ("DeepseekV3ForCausalLM", "GptOssForCausalLM", "JambaForCausalLM")
MARKED = some_fast(FAMILIES, FAST)
every_family = pytest.mark.parametrize("architecture", MARKED)


class Dropping(Served):
    """A served model with a budget of kept tokens."""

    def __init__(
        self,
        architecture: str,
        budget: str,
        kv_bytes: int = 8 * MIB,
        batched: int = 256,
        kv_dtype: torch.dtype = torch.float32,
        manager: Manager = "kvell",
        draft_tokens: int = 0,
        max_model_len: int = MAX_MODEL_LEN,
        draft: PagedModel | None = None,
    ) -> None:
        self.architecture = architecture
        module = copy.deepcopy(tiny_module(architecture))
        description = describe_as(module.config, torch.float32, kv_dtype)
        self.budgets = budgets_of(description.layers, budget)
        layers = with_budgets(description.layers, self.budgets)
        kernels = choose_kernels(torch.device("cpu"))
        model = PagedModel(module, replace(description, layers=layers), kernels, kv_dtype)
        self.recorder = Recorder(model)
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            manager=manager,
            num_speculative_tokens=draft_tokens,
        )
        self.engine = build_engine(self.recorder, architecture, options, draft=draft)  # type: ignore[arg-type]
        self.answers: dict[str, Answer] = {}

    def oracle(self) -> Oracle:
        return Oracle(self.architecture, self.budgets)

    def dropping_tokens(self, name: str) -> set[int]:
        """Tokens that a running request's pages of dropping groups have room for."""
        core = self.engine.core
        (request,) = [r for r in core.scheduler.seats.running if r.request_id == name]
        rows = core.memory.held_pages(request.handle)
        groups = [i for i, g in enumerate(self.layout.groups) if g.kind is GroupKind.DROPPING]
        return {int((rows[:, 1] == i).sum()) * self.layout.groups[i].page_tokens for i in groups}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, SMALL["vocab_size"]), k=length)


def assert_kept(served: Dropping, names: Sequence[str] = ()) -> None:
    """Answers are those of the explicit mask: logits to 1e-4, tokens but for near ties."""
    outputs = []
    for name in names or served.answers:
        answer = served.answers[name]
        expected = served.oracle().logits(answer.prompt, answer.output)
        largest = float(expected.abs().max())
        assert float((torch.stack(answer.logits) - expected).abs().max()) <= 1e-4 * largest
        for token, row in zip(answer.output, expected, strict=True):
            best, second = row.topk(2).values.tolist()
            assert token == int(row.argmax()) or best - second < 1e-4 * largest
        outputs += answer.output
    assert len(set(outputs)) > len(outputs) // 4


@covering({"architecture": MARKED, "budget": ["24", "pyramid:30"]}, together=1)
def test_one_request(architecture: str, budget: str) -> None:
    served = Dropping(architecture, budget)
    answer = served.ask("one", prompt_of(100), outputs=20)
    assert_kept(served)
    assert error(architecture, answer) > 1e-3, "dropping changes nothing: the test proves nothing"


@every_family
def test_a_budget_of_the_whole_prompt_drops_nothing(architecture: str) -> None:
    served = Dropping(architecture, "100")
    answer = served.ask("one", prompt_of(100), outputs=20)
    assert error(architecture, answer) <= 1e-4
    assert answer.cached_tokens == 0
    more = served.ask("two", [*prompt_of(90), 5, 6], outputs=2).cached_tokens
    assert more == (64 if architecture == "JambaForCausalLM" else 90), "states are kept at 64"


@every_family
def test_ragged_batch_in_small_chunks(architecture: str) -> None:
    """Prompts below, at and above the budgets; chunks that would cut what observes."""
    served = Dropping(architecture, "pyramid:30", batched=23)
    for index, length in enumerate((100, 9, 30, 31, 64, 47)):
        served.submit(f"r{index}", prompt_of(length, seed=index), outputs=6 + index)
    served.run()
    assert_kept(served)


@pytest.mark.parametrize("batched", some_fast(range(8, 40, 3), (8, 17, 38)))
def test_no_chunk_changes_what_is_kept(batched: int) -> None:
    served = Dropping(LLAMA, "24", batched=batched)
    served.submit("one", prompt_of(61), outputs=4)
    while served.engine.has_work():
        ends = [r.computed for r in served.engine.core.scheduler.seats.running]
        assert all(end <= 61 - 8 or end >= 61 for end in ends)
        served.step()
    assert_kept(served)


def test_pages_are_given_back_when_the_prompt_is_computed() -> None:
    served = Dropping(LLAMA, "24", batched=48)
    served.submit("one", prompt_of(100), outputs=40)
    held = []
    for _ in range(3):
        served.step()
        held.append(served.dropping_tokens("one"))
    assert held == [{48}, {96}, {32}]  # pages of 16 tokens
    served.run()
    assert_kept(served)


def test_each_layer_of_a_pyramid_keeps_its_own_budget() -> None:
    served = Dropping(LLAMA, "pyramid:40")
    assert list(served.budgets.values()) == sorted(served.budgets.values(), reverse=True)
    assert len(set(served.budgets.values())) == 3
    assert sum(served.budgets.values()) == 3 * 40
    served.submit("one", prompt_of(120), outputs=3)
    served.step()
    wanted = {-(-budget // 16) * 16 for budget in served.budgets.values()}
    assert served.dropping_tokens("one") == wanted
    served.run()
    oracle = served.oracle()
    oracle.logits(prompt_of(120), [1])
    assert {i: len(kept[0]) for i, kept in oracle.kept.items()} == served.budgets


@pytest.mark.parametrize("architecture", some_fast(FAMILIES, FAST[1:2]))
def test_preempted_and_resumed(architecture: str) -> None:
    """What is computed again: the prompt, dropped again, then what was generated."""
    need_bytes = pool_bytes_for(Dropping(architecture, "16").layout, 96, 64)
    served = Dropping(architecture, "16", need_bytes * 5 // 4, max_model_len=96)
    for index in range(10):
        served.submit(f"r{index}", prompt_of(20 + index, seed=index), outputs=50)
    served.run()
    ends = [answer.finished for answer in served.answers.values()]
    assert sum(end.preemptions for end in ends if end is not None) > 0
    assert_kept(served)


def test_a_neighbour_that_is_cancelled_changes_nothing() -> None:
    served = Dropping(LLAMA, "24", batched=64)
    for index in range(3):
        served.submit(f"r{index}", prompt_of(80, seed=index), outputs=12)
    for _ in range(4):
        served.step()
    served.cancel("r1")
    served.run()
    assert_kept(served, ["r0", "r2"])


def test_order_of_execution_changes_nothing() -> None:
    outputs = []
    for order in ((0, 1, 2), (2, 1, 0)):
        served = Dropping(LLAMA, "24", batched=64)
        for index in order:
            served.submit(f"r{index}", prompt_of(50 + 20 * index, seed=index), outputs=10)
        served.run()
        outputs.append({name: answer.output for name, answer in served.answers.items()})
    assert outputs[0] == outputs[1]


def test_long_prompts_share_no_prefix() -> None:
    """What they keep is chosen by their own end; short ones share as ever."""
    served = Dropping(LLAMA, "64")
    assert served.ask("short", prompt_of(60), outputs=20).cached_tokens == 0
    turn = [*prompt_of(60), *served.answers["short"].output, 7, 8]
    assert len(turn) > 64
    assert served.ask("long", turn, outputs=8).cached_tokens == 0
    assert served.ask("same", turn, outputs=8).cached_tokens == 0
    assert served.ask("again", [*prompt_of(60), 9], outputs=8).cached_tokens == 60
    assert_kept(served)


def test_an_early_token_that_is_kept_matters_and_one_that_is_dropped_does_not() -> None:
    """A page of the cache is overwritten after the prompt: row 0 is read, row 30 is not."""
    outcomes = []
    for row in (None, 0, 30):
        served = Dropping(LLAMA, "24", batched=256)
        served.submit("one", prompt_of(100), outputs=6)
        served.step()
        if row is not None:
            damage(served, row)
        served.run()
        outcomes.append(torch.stack(served.answers["one"].logits))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert not torch.allclose(outcomes[0][1:], outcomes[1][1:], rtol=1e-3)
    assert torch.equal(outcomes[0], outcomes[2])


def damage(served: Dropping, row: int) -> None:
    """Another key at a row of the first head of the first layer."""
    (request,) = served.engine.core.scheduler.seats.running
    rows = served.engine.core.memory.held_pages(request.handle)
    page = int(rows[rows[:, 2] == row // 16][0, 3])
    first = row % 16 * SMALL["head_dim"] * 4
    key = served.page_bytes(0, page)[first : first + SMALL["head_dim"] * 4]
    key.view(torch.float32).fill_(3.0)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_rows_move_with_their_scales(kv_dtype: torch.dtype) -> None:
    """Near the explicit mask in full precision, and far from nothing dropped."""
    served = Dropping(LLAMA, "24", kv_dtype=kv_dtype)
    answer = served.ask("one", prompt_of(100), outputs=8)
    expected = served.oracle().logits(answer.prompt, answer.output)
    wrong = float((torch.stack(answer.logits) - expected).norm() / expected.norm())
    far = float((oracle_rows(LLAMA, answer) - expected).norm() / expected.norm())
    assert wrong < far / 2


def draft_of(architecture: str) -> PagedModel:
    module = copy.deepcopy(tiny_module(architecture))
    description = describe_as(module.config, torch.float32, torch.float32)
    return PagedModel(module, description, choose_kernels(torch.device("cpu")))


@pytest.mark.parametrize(
    "drafter", some_fast([None, LLAMA, "Gemma2ForCausalLM"], [None, "Gemma2ForCausalLM"])
)
def test_draft_tokens_after_a_dropped_prompt_change_nothing(drafter: str | None) -> None:
    outputs = []
    for draft_tokens in (0, 3):
        draft = draft_of(drafter) if drafter and draft_tokens else None
        served, tokens = Dropping(LLAMA, "24", draft_tokens=draft_tokens, draft=draft), []
        served.submit("one", [*prompt_of(10), 7] * 8, outputs=60)
        while served.engine.has_work():
            events = served.engine.step()
            tokens += [t for e in events if isinstance(e, Tokens) for t in e.token_ids]
        outputs.append(tokens)
        assert (served.engine.core.stats().spec_decode_draft_tokens > 0) == (draft_tokens > 0)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 60


@pytest.mark.parametrize("manager", ["jenga", "static", "max-page"])
def test_every_manager_that_frees_pages(manager: Manager) -> None:
    served = Dropping(LLAMA, "pyramid:30", manager=manager)
    for index in range(3):
        served.submit(f"r{index}", prompt_of(80, seed=index), outputs=8)
    served.run()
    assert_kept(served)


@pytest.mark.parametrize("manager", ["paged", "manual"])
def test_managers_that_keep_every_token_are_refused(manager: Manager) -> None:
    with pytest.raises(ChangeSomething, match=f"--manager={manager}, which keeps every token"):
        Dropping(LLAMA, "24", manager=manager)


def test_steps_too_small_for_what_observes_are_refused() -> None:
    with pytest.raises(ChangeSomething, match="use at least 8") as caught:
        Dropping(LLAMA, "24", batched=7)
    assert caught.value.field == "--max-num-batched-tokens"


def test_a_model_without_full_attention_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="no layers of full attention"):
        Dropping("MistralForCausalLM", "24")
