"""Scripts that were written for vLLM's ``LLM`` run as they are."""

from pathlib import Path
from typing import Any

import pytest

from kvell import LLM, SamplingParams
from kvell.errors import ChangeSomething
from kvell.vocabulary import GIB, MIB

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


@pytest.fixture(scope="module")
def llm(shallow_path: Path) -> LLM:
    path = shallow_path.parent
    return LLM("smollm2", cache_dir=path, kv_memory_bytes=16 * MIB, dtype="float32")


def test_an_output_has_what_scripts_read(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    [output] = llm.generate([TEXT], sampling_params=params, use_tqdm=False)
    [answer] = output.outputs
    assert (output.prompt, output.finished, output.request_id) == (TEXT, True, "0")
    assert output.prompt_token_ids == llm.get_tokenizer()(TEXT)["input_ids"]
    assert (answer.text, answer.token_ids) == (output.text, output.token_ids)
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert answer.logprobs is not None
    assert output.logprobs is not None
    for token, likely, told in zip(answer.token_ids, answer.logprobs, output.logprobs, strict=True):
        assert likely[token].logprob == told.logprob
        assert likely[token].rank == 1
        assert likely[token].decoded_token == llm.get_tokenizer().decode([token])
        assert [one.rank for one in likely.values()] == [1, 2]
    assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in output.logprobs))


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    assert output.prompt is None


def test_answers_to_a_prompt_are_its_outputs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=6, n=3)
    outputs = llm.generate([TEXT, "Once"], params)
    assert [output.prompt for output in outputs] == [TEXT, "Once"]
    for output in outputs:
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3
        assert output.token_ids == output.outputs[0].token_ids


def test_a_conversation_takes_the_same_names(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    [named] = llm.chat(messages, sampling_params=GREEDY, use_tqdm=False)
    [placed] = llm.chat(messages, GREEDY)
    assert named.outputs[0].token_ids == placed.token_ids
    rendered = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert named.prompt == rendered


def test_a_bar_counts_requests_that_have_ended(llm: LLM) -> None:
    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.ended, self.is_open = total, 0, False
            bars.append(self)

        def __enter__(self) -> "Bar":
            self.is_open = True
            return self

        def __exit__(self, *_error: object) -> None:
            self.is_open = False

        def update(self) -> None:
            assert self.is_open
            self.ended += 1

    bars: list[Bar] = []
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    [bar] = bars
    assert (bar.total, bar.ended, bar.is_open) == (3, 3, False)


def test_a_bar_is_shown_when_it_is_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(["a"], GREEDY, use_tqdm=True)
    assert "1/1" in capfd.readouterr().err


@pytest.mark.parametrize(
    "given", [{"temperature": 0}, "greedy", [None], [GREEDY, GREEDY]], ids=repr
)
def test_other_parameters_are_refused_by_field(llm: LLM, given: Any) -> None:
    with pytest.raises(ChangeSomething) as refused:
        llm.generate([TEXT], sampling_params=given)
    assert refused.value.field == "sampling_params"


def test_parameters_under_both_names_are_refused(llm: LLM) -> None:
    with pytest.raises(ChangeSomething, match="give one of the two"):
        llm.generate([TEXT], GREEDY, sampling_params=GREEDY)


@pytest.mark.parametrize("given", [None, 5, b"Hi", [5], [[1.5]], [[]], [{}], [None]], ids=repr)
def test_other_prompts_are_refused_wherever_they_are_given(llm: LLM, given: Any) -> None:
    for call in (llm.generate, llm.embed):
        with pytest.raises(ChangeSomething, match="prompt"):
            call(given)


def test_a_cache_that_is_reset_hits_nothing(llm: LLM) -> None:
    llm.generate([TEXT], GREEDY)
    assert llm.generate([TEXT], GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    memory = llm.engine.core.memory
    assert memory.empty_large_pages() == memory.layout.num_large_pages
    assert llm.generate([TEXT], GREEDY)[0].num_cached_tokens == 0
    assert llm.engine.core.audit() == ()


def test_a_reset_keeps_what_an_open_stream_reads(llm: LLM) -> None:
    expected = "".join(llm.stream(TEXT, GREEDY))
    stream = llm.stream(TEXT, GREEDY)
    first = next(stream)
    assert llm.reset_prefix_cache() is False
    assert first + "".join(stream) == expected
    assert llm.engine.core.audit() == ()


@pytest.fixture(scope="module")
def uncached(shallow_path: Path) -> LLM:
    path = shallow_path.parent
    size = 16 * MIB
    return LLM(
        "smollm2",
        cache_dir=path,
        kv_memory_bytes=size,
        cpu_buffer="16MiB",
        dtype="float32",
        enable_prefix_caching=False,
    )


class TestWithoutPrefixCaching:
    def test_no_request_hits_pages_of_another(self, llm: LLM, uncached: LLM) -> None:
        expected = [output.token_ids for output in llm.generate([TEXT], GREEDY)]
        for _ in range(2):
            outputs = uncached.generate([TEXT, TEXT], GREEDY)
            assert [output.num_cached_tokens for output in outputs] == [0, 0]
            assert [output.token_ids for output in outputs] == expected * 2
        assert uncached.embed(TEXT)[0].cached_tokens == 0
        [first, second] = uncached.generate(
            [TEXT], SamplingParams(temperature=1, n=2, seed=1, max_tokens=4)
        )[0].outputs
        assert first.token_ids != second.token_ids
        counters = uncached.engine.core.stats()
        assert (counters.prefix_cache_hits, sum(counters.misses.values())) == (0, 0)
        assert uncached.engine.core.audit() == ()

    def test_pages_of_ended_requests_give_way(self, uncached: LLM) -> None:
        texts = [f"{number} {TEXT}" * 12 for number in range(12)]
        outputs = uncached.generate(texts, GREEDY)
        assert {output.num_cached_tokens for output in outputs} == {0}
        assert uncached.engine.core.audit() == ()

    def test_a_protected_prefix_is_refused(self, shallow_path: Path) -> None:
        with pytest.raises(ChangeSomething, match="--no-enable-prefix-caching keeps none"):
            LLM(
                "smollm2",
                cache_dir=shallow_path.parent,
                kv_memory="16MiB",
                common_pool=True,
                enable_prefix_caching=False,
            )


class TestShareOfMemory:
    def test_is_a_pool_of_bytes_that_the_log_names(
        self,
        shallow_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr("kvell.engine.setup.sizes.available_bytes", lambda: 2 * GIB)
        with LLM(
            "smollm2",
            cache_dir=shallow_path.parent,
            dtype="float32",
            gpu_memory_utilization=0.5,
        ) as model:
            contract = model.contract
            total_bytes = 2 * GIB + contract.weights_bytes
            taken_bytes = contract.weights_bytes + contract.activation_reserve_bytes
            left_bytes = total_bytes // 2 - taken_bytes
            assert left_bytes - 8 * MIB <= contract.kv_pool_bytes <= left_bytes
        [line] = [r.getMessage() for r in caplog.records if "utilization" in r.getMessage()]
        assert "0.5 of 2." in line and "for the KV pool" in line

    def test_that_leaves_nothing_is_refused_with_one_that_does(
        self, shallow_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvell.engine.setup.sizes.available_bytes", lambda: 2 * GIB)
        with pytest.raises(ChangeSomething, match=r"leaves nothing .* use more than 0\.\d+"):
            LLM("smollm2", cache_dir=shallow_path.parent, gpu_memory_utilization=0.001)

    def test_a_size_wins(self, shallow_path: Path) -> None:
        path = shallow_path.parent
        with LLM("smollm2", cache_dir=path, kv_memory="16MiB", gpu_memory_utilization=0.9) as model:
            assert model.contract.kv_pool_bytes <= 16 * MIB
