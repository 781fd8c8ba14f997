"""The seams of the forward pass, its guards, and the pool as layers see it."""

from dataclasses import replace
from mmap import mmap
from typing import Any

import pytest
import torch
import transformers

from kvell.attention.portable import PortableKernels
from kvell.models.config.description import describe
from kvell.models.forward import hook
from kvell.models.forward.kv_memory import host_pool, layer_pages, pool_tensor
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from tests.models.harness import (
    SMALL,
    assert_exact,
    paged,
    prompt_ids,
    runner_over,
    small_layout,
    tiny_config,
    tiny_module,
)
from tests.models.loading.recorder import Recorder, assert_every_seam_in_order, batch_of
from tests.models.random_model import random_paged_model

CPU = torch.device("cpu")


def test_callbacks_come_at_every_seam_in_order() -> None:
    assert_every_seam_in_order(paged(tiny_module("Gemma3ForCausalLM")))


def test_keys_are_in_their_pages_when_the_callback_says_so() -> None:
    runner = runner_over(paged(tiny_module("LlamaForCausalLM")))
    untouched = runner.pool.clone()
    written: list[int] = []

    class Watch(Recorder):
        def after_kv_write(self, layer: int) -> None:
            written.append(int((runner.pool != untouched).sum()))

    runner.callbacks = Watch()
    runner.step([("a", prompt_ids(8))])
    token_bytes = runner.model.description.layers[0].token_bytes
    assert len(written) == 3
    # A stored byte may happen to equal the 0xFF that stood there.
    assert all(0.95 * 8 * token_bytes * n <= w for n, w in enumerate(written, 1))
    assert all(w <= 8 * token_bytes * n for n, w in enumerate(written, 1))


def test_only_the_rows_asked_for_get_logits() -> None:
    model, ids = paged(tiny_module("Gemma2ForCausalLM")), prompt_ids(11)
    every = runner_over(model).step([("a", ids)])
    runner = runner_over(model)
    batch = replace(batch_of(runner, ids), logits_rows=torch.tensor([10, 3]))
    assert_exact(model.forward(batch), every[[10, 3]])


def test_a_step_without_logits() -> None:
    """A prefill chunk that does not end its prompt."""
    model = paged(tiny_module("LlamaForCausalLM"))
    batch = batch_of(runner_over(model), prompt_ids(11))
    none = replace(batch, logits_rows=torch.empty(0, dtype=torch.int64))
    assert model.forward(none).shape == (0, 509)


def test_logits_are_float32_in_bf16_models() -> None:
    module = random_module(tiny_config("LlamaForCausalLM"), 3, torch.bfloat16)
    logits = runner_over(paged(module)).step([("a", prompt_ids(5))])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_memory_must_be_attached_first() -> None:
    model = paged(tiny_module("LlamaForCausalLM"))
    batch = batch_of(runner_over(paged(tiny_module("LlamaForCausalLM"))), [3, 4])
    with pytest.raises(RuntimeError, match="attach"):
        model.forward(batch)


def test_window_that_differs_from_the_description_is_noticed() -> None:
    module = tiny_module("MistralForCausalLM")
    description = describe(module.config, 4)
    wrong = replace(
        description,
        layers=tuple(replace(layer, window_tokens=8) for layer in description.layers),
    )
    model = PagedModel(random_module(module.config, 3, scale=8.0), wrong, PortableKernels())
    with pytest.raises(RuntimeError, match=r"window 9.*window 8"):
        runner_over(model).step([("a", prompt_ids(4))])


def test_layer_that_never_attends_over_pages_is_noticed() -> None:
    """As a recurrent layer among attention layers would."""
    module = tiny_module("LlamaForCausalLM")
    description = describe(module.config, 4)
    extra = replace(description.layers[-1], index=3)
    model = PagedModel(
        random_module(module.config, 3, scale=8.0),
        replace(description, layers=(*description.layers, extra)),
        PortableKernels(),
    )
    with pytest.raises(RuntimeError, match="3 of 4 layers"):
        runner_over(model).step([("a", prompt_ids(4))])


def test_two_models_share_no_state() -> None:
    one, two = paged(tiny_module("LlamaForCausalLM")), paged(tiny_module("GptOssForCausalLM"))
    ids = prompt_ids(16)
    alone = [runner_over(model).step([("a", ids)]) for model in (one, two)]
    runners = [runner_over(model) for model in (one, two)]
    halves = [
        [r.step([("a", ids[:8])]) for r in runners],
        [r.step([("a", ids[8:])]) for r in runners],
    ]
    for index in range(2):
        assert_exact(torch.cat([half[index] for half in halves]), alone[index])


def test_hook_passes_the_scores_rule_on() -> None:
    seen: list[hook.LayerCall] = []

    class Step:
        def attend(self, call: hook.LayerCall) -> torch.Tensor:
            seen.append(call)
            return call.query

    module: Any = torch.nn.Module()
    module.layer_idx = 4
    q, kv = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8)
    sinks = torch.randn(6, dtype=torch.bfloat16)
    output, weights = hook.paged_attention(
        module, q, kv, kv, None, scaling=0.3, sliding_window=7, softcap=20.0, s_aux=sinks,
        dropout=0.0, kvell_step=Step(),
    )  # fmt: skip
    call = seen[0]
    assert weights is None
    assert torch.equal(output, q.transpose(1, 2))
    assert (call.layer, call.query.shape, call.key.shape) == (4, (5, 6, 8), (5, 2, 8))
    assert (call.params.scale, call.params.window_tokens, call.params.softcap) == (0.3, 7, 20.0)
    assert call.params.sinks is not None
    assert torch.equal(call.params.sinks, sinks.float())


def test_scale_defaults_to_the_head_size() -> None:
    scales: list[float] = []

    class Step:
        def attend(self, call: hook.LayerCall) -> torch.Tensor:
            scales.append(call.params.scale)
            return call.query

    module: Any = torch.nn.Module()
    module.layer_idx = 0
    q = torch.randn(1, 2, 3, 16)
    hook.paged_attention(module, q, q, q, None, kvell_step=Step())
    assert scales == [0.25]


def test_layer_pages_follow_the_layout() -> None:
    description = describe(tiny_config("Gemma3ForCausalLM"), 4)
    layout = small_layout(description)
    pool = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    pages = list(layer_pages(layout, description, pool, torch.float32).values())
    layer_bytes = 2 * 2 * 16 * 4 * 4
    assert [entry.layer_offset_bytes for entry in pages] == [
        0, layer_bytes, 2 * layer_bytes, 3 * layer_bytes, 4 * layer_bytes, 0
    ]  # fmt: skip
    assert pages[0].page_stride_bytes == 6 * layer_bytes
    assert pages[5].page_stride_bytes == 2 * layer_bytes
    assert all(entry.pool is pool for entry in pages)


def test_layer_pages_refuse_what_does_not_fit() -> None:
    description = describe(tiny_config("LlamaForCausalLM"), 4)
    layout = small_layout(description)
    pool = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes"):
        layer_pages(layout, description, pool[:-1], torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        layer_pages(layout, description, pool, torch.bfloat16)


def test_host_pool_is_the_buffer_itself() -> None:
    memory = mmap(-1, 8192)
    pool = pool_tensor(memory, 4096, CPU)
    pool[5] = 77
    assert memory[5] == 77
    assert pool.shape == (4096,)


def test_host_pool_keeps_its_buffer_alive() -> None:
    pool = host_pool(bytearray(b"kvell"))
    assert bytes(pool.tolist()) == b"kvell"


def test_host_pool_needs_a_buffer_that_is_large_enough() -> None:
    for buffer in (None, bytearray(10)):
        with pytest.raises(ValueError, match="host buffer"):
            pool_tensor(buffer, 11, CPU)


def test_pool_on_another_device_needs_no_buffer() -> None:
    pool = pool_tensor(None, 64, torch.device("meta"))
    assert (pool.shape, pool.dtype, pool.device.type) == ((64,), torch.uint8, "meta")


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = tiny_config("LlamaForCausalLM")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two, other = (random_module(config, seed, scale=8.0) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [m.lm_head.weight for m in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_random_weights_are_untied_and_leave_the_config_alone() -> None:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    model = random_paged_model(config, PortableKernels(), scale=8.0)
    assert config.tie_word_embeddings
    assert not torch.equal(model.module.lm_head.weight, model.module.model.embed_tokens.weight)
