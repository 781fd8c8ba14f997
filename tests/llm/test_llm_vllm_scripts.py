"""The calls of vLLM's offline examples, with ``kvell`` in place of ``vllm``."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvell
from kvell import LLM, EngineArgs, SamplingParams
from kvell.errors import ChangeSomething, UnknownArgument
from kvell.vocabulary import MIB

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


@pytest.fixture(scope="module")
def arguments(shallow_path: Path) -> dict[str, Any]:
    return {"cache_dir": shallow_path.parent, "kv_memory": "16MiB", "dtype": "float32"}


@pytest.fixture(scope="module")
def llm(arguments: dict[str, Any]) -> Iterator[LLM]:
    with LLM(
        model="smollm2",
        runner="pooling",
        trust_remote_code=True,
        tensor_parallel_size=1,
        disable_log_stats=True,
        **arguments,
    ) as model:
        yield model


def test_basic(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.outputs[0].text for output in outputs)


class TestChat:
    def test_flags_of_a_script_make_a_model(self, arguments: dict[str, Any]) -> None:
        from kvell.utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(model="smollm2")
        group = parser.add_argument_group("Sampling parameters")
        group.add_argument("--max-tokens", type=int)
        group.add_argument("--top-p", type=float)
        words = ["--max_tokens", "3", "--max-model-len", "256", "--trust-remote-code"]
        args = vars(parser.parse_args([*words, "--kv_memory=16MiB"]))
        max_tokens, top_p = args.pop("max_tokens"), args.pop("top_p")
        with LLM(**args, cache_dir=arguments["cache_dir"]) as model:
            params = model.get_default_sampling_params()
            if max_tokens is not None:
                params.max_tokens = max_tokens
            if top_p is not None:
                params.top_p = top_p
            message = {"role": "user", "content": "Hello"}
            [output] = model.chat([message], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3
            assert model.contract.kv_pool_bytes <= 16 * MIB
            assert model.engine.core.limits.max_model_len == 256

    def test_batches_and_templates(self, llm: LLM) -> None:
        params = llm.get_default_sampling_params()
        params.max_tokens = 3
        assert llm.get_default_sampling_params().max_tokens != 3
        conversation = [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "Hello"},
        ]
        outputs = llm.chat([conversation] * 3, sampling_params=params, use_tqdm=True)
        assert [len(output.outputs) for output in outputs] == [1, 1, 1]
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        [output] = llm.chat(conversation, params, chat_template=template, chat_template_kwargs=None)
        assert output.prompt == "You are a helpful assistantHello"


def test_embed(llm: LLM) -> None:
    outputs = llm.embed(PROMPTS, use_tqdm=False, pooling_params=kvell.PoolingParams())
    for output in outputs:
        vector = output.outputs.embedding
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
        assert len(vector) == output.outputs.hidden_size == 576
    [encoded] = llm.encode(PROMPTS[0], pooling_task="embed")
    assert encoded.outputs.data.tolist() == pytest.approx(outputs[0].outputs.embedding)
    with pytest.raises(ChangeSomething, match="task='token_embed': is not served; use embed"):
        llm.encode(PROMPTS[0], pooling_task="token_embed")


def test_score(llm: LLM) -> None:
    same, other = llm.score(TEXT, [TEXT, "Zebras"])
    assert same.outputs.score == pytest.approx(1)
    assert -1 <= other.outputs.score < same.outputs.score
    assert [each.outputs.score for each in llm.score([TEXT, "a"], [TEXT, "a"])] == pytest.approx(
        [1, 1]
    )
    with pytest.raises(ChangeSomething, match="data_1=2 texts: does not match the 3 texts"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_classify_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ChangeSomething, match="model=smollm2: has no classification head"):
        llm.classify(PROMPTS)


def test_structured_outputs(llm: LLM) -> None:
    from kvell.sampling_params import StructuredOutputsParams

    def answer(**constraint: Any) -> str:
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(**constraint),
        )
        return llm.generate("Classify: kvell is fine!", sampling_params=params)[0].outputs[0].text

    assert answer(choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert answer(regex=r"[a-z]{3}\n", disable_fallback=True)[3:] == "\n"
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert answer(json=schema, disable_any_whitespace=True) in ('{"a": true}', '{"a": false}')
    choice: Any = {"choice": ["a", "b"]}
    params = SamplingParams(structured_outputs=choice)
    assert llm.generate("a or b?", params)[0].outputs[0].text in ("a", "b")


class TestStreaming:
    def test_pieces_of_an_answer(self, arguments: dict[str, Any]) -> None:
        from kvell.engine.arg_utils import AsyncEngineArgs
        from kvell.sampling_params import RequestOutputKind
        from kvell.v1.engine.async_llm import AsyncLLM

        async def main() -> tuple[str, list[int], str]:
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2", **arguments))
            try:
                pieces, token_ids, whole = "", list[int](), ""
                params = SamplingParams(
                    max_tokens=6, temperature=0, output_kind=RequestOutputKind.DELTA, logprobs=1
                )
                async for output in engine.generate(
                    request_id="stream-1", prompt=TEXT, sampling_params=params
                ):
                    for completion in output.outputs:
                        pieces += completion.text
                        token_ids += completion.token_ids
                        assert len(completion.logprobs or ()) == len(completion.token_ids)
                    if output.finished:
                        break
                params.output_kind = RequestOutputKind.FINAL_ONLY
                outputs = [output async for output in engine.generate(TEXT, params)]
                [last] = outputs
                whole = last.outputs[0].text
                assert last.outputs[0].finish_reason == "length"
                async for vector in engine.encode(TEXT, kvell.PoolingParams(), "vector-1"):
                    assert vector.outputs.hidden_size == 576
                with pytest.raises(UnknownArgument, match="temprature=1: is not an argument of"):
                    async for _ in engine.generate(TEXT, temprature=1):
                        pass
                return pieces, token_ids, whole
            finally:
                engine.shutdown()

        pieces, token_ids, whole = asyncio.run(main())
        assert pieces == whole
        assert len(token_ids) == 6


def test_an_engine_is_shut_down_outside_of_a_loop_too(arguments: dict[str, Any]) -> None:
    engine = kvell.AsyncEngine("smollm2", **arguments)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.shutdown())
    loop.close()


def test_prefix_caching(llm: LLM, arguments: dict[str, Any]) -> None:
    from kvell.distributed import cleanup_dist_env_and_memory

    with LLM(
        model="smollm2", enable_prefix_caching=False, gpu_memory_utilization=0.4, **arguments
    ) as regular:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        prompts = [TEXT + prompt for prompt in PROMPTS]
        plain = regular.generate(prompts, params)
        cleanup_dist_env_and_memory()
        llm.generate(prompts[0], params)
        cached = llm.generate(prompts, params)
        assert [output.outputs[0].text for output in cached] == [
            output.outputs[0].text for output in plain
        ]
        assert all(output.num_cached_tokens for output in cached)
        assert not any(output.num_cached_tokens for output in plain)


def test_speculative_decoding(arguments: dict[str, Any]) -> None:
    from kvell.v1.metrics.reader import Counter, Vector

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with LLM(
        model="smollm2", speculative_config=config, disable_log_stats=False, **arguments
    ) as model:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        model.generate([TEXT + " " + TEXT], params)
        counts = {each.name: each for each in model.get_metrics()}
        drafts = counts["kvell:spec_decode_num_drafts"]
        tokens = counts["kvell:spec_decode_num_draft_tokens"]
        accepted = counts["kvell:spec_decode_num_accepted_tokens"]
        positions = counts["kvell:spec_decode_num_accepted_tokens_per_pos"]
        assert isinstance(drafts, Counter) and isinstance(tokens, Counter)
        assert isinstance(accepted, Counter) and isinstance(positions, Vector)
        assert 0 < drafts.value <= tokens.value <= 3 * drafts.value
        assert sum(positions.values) == accepted.value


def test_beam_search(llm: LLM) -> None:
    from kvell.sampling_params import BeamSearchParams

    others: Any = {"include_stop_str_in_output": False}
    params = BeamSearchParams(beam_width=2, max_tokens=4, **others)
    prompts: list[Any] = [{"prompt": TEXT}, "Once"]
    outputs = llm.beam_search(prompts, params, use_tqdm=True, lora_request=None)
    for output in outputs:
        first, second = output.sequences
        assert first.cum_logprob >= second.cum_logprob
        assert first.text and first.tokens == first.token_ids
    with pytest.raises(UnknownArgument, match=r"beam_widht=2: .* did you mean beam_width"):
        BeamSearchParams(beam_widht=2, max_tokens=4)  # type: ignore[call-arg]


def test_an_engine_in_steps(arguments: dict[str, Any]) -> None:
    args = EngineArgs(model="smollm2", enable_lora=False, **arguments)
    engine = kvell.LLMEngine.from_engine_args(args)
    waiting = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, max_tokens=5)),
    ]
    final: dict[str, kvell.RequestOutput] = {}
    number = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        for output in engine.step():
            assert isinstance(output, kvell.RequestOutput)
            if output.finished:
                final[output.request_id] = output
    assert sorted(final) == ["0", "1", "2"]
    assert [len(final[name].outputs) for name in sorted(final)] == [1, 1, 2]
    times = final["0"].metrics
    assert times is not None and times.finished_time is not None
    assert times.first_token_time is not None and times.last_token_time is not None
    assert times.arrival_time <= times.first_token_time <= times.last_token_time
    assert times.num_generation_tokens == len(final["0"].token_ids)

    kind = kvell.RequestOutputKind.DELTA
    engine.add_request("delta", TEXT, SamplingParams(temperature=0, max_tokens=6, output_kind=kind))
    engine.add_request("vector", TEXT, kvell.PoolingParams())
    engine.add_request("gone", TEXT, SamplingParams(max_tokens=64))
    with pytest.raises(ChangeSomething, match="request_id=gone: is in use"):
        engine.add_request("gone", TEXT)
    engine.abort_request("gone")
    pieces, vectors = list[int](), 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id in ("delta", "vector")
            if isinstance(output, kvell.RequestOutput):
                pieces += output.outputs[0].token_ids
            else:
                vectors += 1
    params = SamplingParams(temperature=0, max_tokens=6)
    assert pieces == engine.llm.generate(TEXT, params)[0].outputs[0].token_ids
    assert vectors == 1
    assert engine.step() == []
    engine.close()


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(TEXT, params)
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    for token, position in zip(output.prompt_token_ids[1:], others, strict=True):
        assert position is not None
        assert position[token].logprob <= 0
        assert min(entry.rank for entry in position.values()) == 1
    answer = output.outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position[token].decoded_token == llm.get_tokenizer().decode([token])


def test_prompts_as_mappings(llm: LLM) -> None:
    from kvell.inputs import TextPrompt, TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=3)
    ids = llm.get_tokenizer()(TEXT)["input_ids"]
    prompts: list[Any] = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=TEXT), TEXT]
    outputs = llm.generate(
        prompts,
        params,
        lora_request=None,
        priority=[0, 1, -1],
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    with pytest.raises(ChangeSomething, match="priority=2 numbers: does not match 1 prompts"):
        llm.generate(TEXT, params, priority=[1, 2])


def test_adapters_are_refused(llm: LLM) -> None:
    from kvell.lora.request import LoRARequest

    with pytest.raises(ChangeSomething, match="merge the adapter into the model"):
        LoRARequest("sql-lora", 1, "/adapter")
    with pytest.raises(ChangeSomething, match="enable_lora=True: Kvell serves no adapters"):
        LLM("smollm2", enable_lora=True)
    with pytest.raises(ChangeSomething, match=r"lora_request=.*: LLM.generate does not support it"):
        llm.generate(TEXT, lora_request=object())


@pytest.mark.parametrize("method", ["generate", "chat", "embed", "encode", "beam_search", "score"])
def test_an_unknown_argument_of_a_method_is_named(llm: LLM, method: str) -> None:
    needed: dict[str, list[Any]] = {
        "beam_search": [["a"], kvell.BeamSearchParams(beam_width=1, max_tokens=1)],
        "score": ["a", "b"],
        "chat": [[{"role": "user", "content": "a"}]],
    }
    with pytest.raises(UnknownArgument, match="use_tqmd=True: is not an argument of") as caught:
        getattr(llm, method)(*needed.get(method, ["a"]), use_tqmd=True)
    assert isinstance(caught.value, TypeError)
    assert "did you mean use_tqdm?" in str(caught.value)


def test_requests_keep_the_parameters_with_which_they_began(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    stream = llm.stream(TEXT, params)
    pieces = [next(stream)]
    params.max_tokens = 1
    params.stop = ("a", "e", "i", "o")
    pieces += stream
    whole = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert "".join(pieces) == llm.generate(TEXT, whole)[0].text


def test_public_names_are_listed() -> None:
    assert {"LLM", "SamplingParams", "AsyncLLM", "EngineArgs"} <= set(dir(kvell))
    assert not any(name in dir(kvell) for name in ("Any", "MODULES"))
    assert all(hasattr(kvell, name) for name in dir(kvell))
