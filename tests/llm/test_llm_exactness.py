"""The whole engine against transformers: real weights, and random ones with windows.

``tests/data/smollm2_greedy.jsonl`` holds what transformers' greedy ``generate`` says
to the fifty committed prompts (``scripts/greedy_oracle.py`` makes it again).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from kvell.vocabulary import MIB
from tests.llm.exactness import DATA, Answer, assert_same, cut, read_oracle, smollm2

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def oracle() -> list[Answer]:
    return read_oracle()


@pytest.mark.parametrize(("last", "count"), [(4, 8), pytest.param(5, 20, marks=pytest.mark.long)])
def test_oracle_is_what_transformers_says(
    smollm2_path: Path, oracle: list[Answer], last: int, count: int
) -> None:
    """The committed answers are not ours: some of them are made again here."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    for answer in oracle[3:last]:
        ids = torch.tensor([answer.prompt])
        made = model.generate(ids, do_sample=False, max_new_tokens=count)
        assert made[0, ids.shape[1] :].tolist() == answer.tokens[:count]


def test_oracle_is_worth_comparing_with(oracle: list[Answer]) -> None:
    tokens = [token for answer in oracle for token in answer.tokens]
    ties = sum(len(answer.near_ties) for answer in oracle)
    assert len(oracle) == 50
    assert len({tuple(answer.prompt) for answer in oracle}) == 50
    assert len(set(tokens)) > 300, "answers that repeat one token prove nothing"
    assert ties < 0.005 * len(tokens)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return smollm2(smollm2_path.parent)


FEW = ((0, 5, 10, 13, 17, 23), (30, 35, 38, 42, 48))
"""Short prompts, and those that begin as these do."""
ALL = (tuple(range(25)), tuple(range(25, 50)))


@pytest.mark.parametrize(
    ("fresh", "sharing", "count", "options"),
    [
        (*FEW, 12, {"max_num_batched_tokens": 320}),  # what they share is computed a step before
        pytest.param(*ALL, 64, {}, marks=pytest.mark.long),
    ],
    ids=["few", "fifty"],
)
def test_prompts_in_one_batch_from_their_text(
    smollm2_path: Path,
    oracle: list[Answer],
    fresh: tuple[int, ...],
    sharing: tuple[int, ...],
    count: int,
    options: dict[str, Any],
) -> None:
    lines = (DATA / "smollm2_prompts.jsonl").read_text().splitlines()
    chosen = [*fresh, *sharing]
    llm = smollm2(smollm2_path.parent, **options)
    params = SamplingParams(temperature=0, max_tokens=count)
    outputs = llm.generate([json.loads(lines[at]) for at in chosen], params)
    assert_same(outputs, [cut(oracle[at], count) for at in chosen])
    hits = sum(output.cached_tokens > 0 for output in outputs[len(fresh) :])
    assert hits >= 0.8 * len(sharing), "shared beginnings"


@pytest.mark.parametrize(
    ("last", "count"), [(12, 10), pytest.param(13, 24, marks=pytest.mark.long)]
)
def test_alone_and_again_from_the_cache(
    llm: LLM, oracle: list[Answer], last: int, count: int
) -> None:
    """One after the other; the second time all of the prompt but its last token is a hit."""
    few = [cut(answer, count) for answer in oracle[10:last]]
    prompts = [answer.prompt for answer in few]
    short = SamplingParams(temperature=0, max_tokens=count)
    assert_same(llm.generate(prompts, short, sequential=True), few)
    again = llm.generate(prompts, short, sequential=True)
    assert_same(again, few)
    assert [o.cached_tokens for o in again] == [len(prompt) - 1 for prompt in prompts]


@pytest.mark.parametrize(
    ("first", "last", "count"), [(21, 24, 8), pytest.param(20, 26, 16, marks=pytest.mark.long)]
)
def test_the_pass_of_transformers_own_code(
    smollm2_path: Path, oracle: list[Answer], first: int, last: int, count: int
) -> None:
    """What serves where there is no fused pass; every other test here is of the fused one."""
    few = [cut(answer, count) for answer in oracle[first:last]]
    llm = smollm2(smollm2_path.parent, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=count)
    assert_same(llm.generate([answer.prompt for answer in few], params), few)


@pytest.mark.long
def test_fifty_prompts_by_the_four_bits_that_the_model_is_packaged_in(
    smollm2_path: Path, oracle: list[Answer]
) -> None:
    """Transformers' answers come from those blocks unpacked: they are the same numbers."""
    llm = smollm2(smollm2_path.parent, quantization="int4")
    assert_same(llm.generate([answer.prompt for answer in oracle], GREEDY), oracle)
    [weights] = [line for line in llm.contract.lines() if "weights" in line]
    assert "92" in weights, "MiB, not the 513 of float32"


@pytest.mark.parametrize(
    ("first", "last", "count"), [(21, 24, 8), pytest.param(20, 26, 16, marks=pytest.mark.long)]
)
def test_eight_bits_answer_too(
    smollm2_path: Path, oracle: list[Answer], first: int, last: int, count: int
) -> None:
    """Not the same numbers, so not all the same tokens; but each answer is that of the model
    asked again alone, whatever the batch."""
    llm = smollm2(smollm2_path.parent, quantization="int8")
    params = SamplingParams(temperature=0, max_tokens=count)
    prompts = [answer.prompt for answer in oracle[first:last]]
    together = [output.token_ids for output in llm.generate(prompts, params)]
    alone = [output.token_ids for output in llm.generate(prompts, params, sequential=True)]
    assert together == alone
    same = [
        ours == theirs
        for answer, tokens in zip(oracle[first:last], together, strict=True)
        for ours, theirs in zip(tokens, answer.tokens, strict=False)
    ]
    assert sum(same) > 0.6 * len(same)


@pytest.mark.parametrize("chunk", [7])
def test_chunked_prefill(smollm2_path: Path, oracle: list[Answer], chunk: int) -> None:
    few = [cut(answer, 12) for answer in sorted(oracle, key=lambda a: len(a.prompt))[6:10]]
    llm = smollm2(smollm2_path.parent, max_num_batched_tokens=chunk, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert_same(llm.generate([answer.prompt for answer in few], params), few)


@pytest.mark.parametrize(
    ("last", "count", "kv_memory_bytes"),
    [(12, 40, 9 * MIB), pytest.param(20, 64, 18 * MIB, marks=pytest.mark.long)],
    ids=["few", "twelve"],
)
def test_preemption(
    smollm2_path: Path, oracle: list[Answer], last: int, count: int, kv_memory_bytes: int
) -> None:
    """A pool for a few requests only: growth preempts, and answers stay the same."""
    few = [cut(one, count) for one in sorted(oracle, key=lambda one: len(one.prompt))[8:last]]
    llm = smollm2(smollm2_path.parent, kv_memory_bytes=kv_memory_bytes)
    params = SamplingParams(temperature=0, max_tokens=count)
    outputs = llm.generate([answer.prompt for answer in few], params)
    assert_same(outputs, few)
    assert sum(output.preemptions for output in outputs) > 0


@pytest.mark.long
def test_all_fifty_by_transformers_own_code(smollm2_path: Path, oracle: list[Answer]) -> None:
    llm = smollm2(smollm2_path.parent, enforce_eager=True)
    assert_same(llm.generate([answer.prompt for answer in oracle], GREEDY), oracle)


@pytest.mark.long
def test_all_fifty_alone(smollm2_path: Path, oracle: list[Answer]) -> None:
    llm = smollm2(smollm2_path.parent)
    outputs = llm.generate([answer.prompt for answer in oracle], GREEDY, sequential=True)
    assert_same(outputs, oracle)


@pytest.mark.long
def test_all_fifty_in_chunks_of_seven(smollm2_path: Path, oracle: list[Answer]) -> None:
    llm = smollm2(smollm2_path.parent, max_num_batched_tokens=7)
    assert_same(llm.generate([answer.prompt for answer in oracle], GREEDY), oracle)


@pytest.mark.long
def test_all_fifty_preempted(smollm2_path: Path, oracle: list[Answer]) -> None:
    llm = smollm2(smollm2_path.parent, kv_memory_bytes=36 * MIB)
    outputs = llm.generate([answer.prompt for answer in oracle], GREEDY)
    assert_same(outputs, oracle)
    assert sum(output.preemptions for output in outputs) > 0
