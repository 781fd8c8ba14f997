"""Draft tokens under each sampling feature, on a text that repeats itself.

``python -m bench.engine.drafts``

Two engines of one process answer the same requests in turn, one with draft tokens from the text.
Their answers must be equal.  A ratio above 1 means that the answer came sooner with draft tokens.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import result_file
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import Reasoning, ReasoningBudget, StructuredOutputs
from kvell.llm import LLM
from kvell.vocabulary import MIB

ITEM = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"type": "string", "maxLength": 12},
        "visited": {"type": "boolean"},
    },
    "required": ["city", "country", "visited"],
    "additionalProperties": False,
}
CITIES = (("Rome", "Italy"), ("Oslo", "Norway"), ("Paris", "France"), ("Lima", "Peru"))
PLACES = json.dumps(
    [{"city": city, "country": country, "visited": True} for city, country in CITIES * 2]
)
PROMPT = f"Copy this list.\n{PLACES}\nThe same list again:\n{PLACES}\nThe same list again:\n"
LIST = StructuredOutputs(
    json=json.dumps({"type": "array", "items": ITEM, "minItems": 8, "maxItems": 8})
)
PERIOD = 30
"""The token "." of SmolLM2."""
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "schema": {"structured_outputs": LIST},
    "schema after a budget": {
        "structured_outputs": replace(LIST, reasoning=Reasoning((".",))),
        "reasoning_budget": ReasoningBudget(16, PERIOD),
    },
    "repetition penalty 1.05": {"repetition_penalty": 1.05},
    "presence, frequency": {"presence_penalty": 0.1, "frequency_penalty": 0.01},
    "logprobs": {"logprobs": 5},
    "logit bias, min_tokens": {"logit_bias": {198: -5.0}, "min_tokens": 64},
    "bad words": {"bad_words": ("Berlin",)},
    "budget": {"reasoning_budget": ReasoningBudget(32, PERIOD)},
}


@dataclass(frozen=True)
class Answer:
    """An answer's tokens, its duration, and the draft tokens that it took."""

    token_ids: list[int]
    seconds: float
    drafted: int
    accepted: int


def answer(llm: LLM, params: SamplingParams) -> Answer:
    """Answer the prompt, of which all but the last page is cached."""
    before = llm.engine.core.stats()
    began_seconds = time.perf_counter()
    [output] = llm.generate(PROMPT, params)
    seconds = time.perf_counter() - began_seconds
    after = llm.engine.core.stats()
    return Answer(
        output.token_ids,
        seconds,
        after.spec_decode_draft_tokens - before.spec_decode_draft_tokens,
        after.spec_decode_accepted_tokens - before.spec_decode_accepted_tokens,
    )


def measure(plain: LLM, drafting: LLM, params: SamplingParams, rounds: int) -> dict[str, Any]:
    """Return the figures of one feature; the first round is not counted.

    :raises RuntimeError: if the answers differ, or no draft token is right.
    """
    pairs = [(answer(plain, params), answer(drafting, params)) for _ in range(1 + rounds)]
    if any(one.token_ids != other.token_ids for one, other in pairs):
        raise RuntimeError("draft tokens changed an answer")
    drafted, accepted = pairs[-1][1].drafted, pairs[-1][1].accepted
    if not accepted:
        raise RuntimeError("no draft token was right")
    ratios = [one.seconds / other.seconds for one, other in pairs[1:]]
    return {
        "tokens": len(pairs[0][0].token_ids),
        "drafted": drafted,
        "accepted": accepted,
        "seconds": [[one.seconds, other.seconds] for one, other in pairs[1:]],
        "ratios": ratios,
        "median_ratio": median(ratios),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Print the figures of each feature, and write the bench's result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    plain, drafting = (
        LLM(args.model, kv_memory_bytes=128 * MIB, num_speculative_tokens=count)
        for count in (0, args.num_speculative_tokens)
    )
    asked = SamplingParams(temperature=0, max_tokens=args.tokens)
    figures = {}
    for name, fields in FEATURES.items():
        figures[name] = measure(plain, drafting, replace(asked, **fields), args.rounds)
        one = figures[name]
        counts = f"{one['accepted']} of {one['drafted']} draft tokens right"
        print(f"{name}: {one['median_ratio']:.2f} times as fast, {counts}", flush=True)
    result_file.write(args.json or result_file.path_of("drafts"), figures)


if __name__ == "__main__":
    main()
