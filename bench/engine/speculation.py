"""Draft tokens: how many are accepted, and how many tokens a step of the model then yields.

SmolLM2 on prompts whose answers repeat them: draft tokens looked up in the text, and those of a
draft model.  The draft model is SmolLM2 again, whose tokens are always accepted: that measures the
plumbing, not a pair that anybody would serve.  And, in virtual time, draft and target
models in one pool (:mod:`bench.replay.speculation`).
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.replay import speculation as replays
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from kvell.vocabulary import MIB

RESULTS = result_file.path_of("speculation")
PARTS = ("engine", "replay")
CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""
NOTES = """On Monday the boat left the harbour at six with four people on board. On Tuesday the wind
turned to the north and the boat stayed behind the island. On Wednesday the four people walked
over the island and found the old lighthouse. On Thursday the boat came back to the harbour."""
TABLE = "\n".join(f"station {n}: temperature {n % 7 + 10} degrees, wind west" for n in range(1, 13))
PROMPTS = (
    f"Copy this text word by word:\n\n{NOTES}",
    f"Write this Python class again, with a docstring for the class:\n\n{CODE}",
    f"Repeat this table, line by line:\n\n{TABLE}",
    f"Translate nothing and change nothing. Print this once more:\n\n{NOTES}",
    f"Here is a class.\n\n{CODE}\nRename the class to Purse and write all of it.",
    "Write the numbers from one to thirty, each on a line of its own.",
)


def answered(tokens: int, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Answer all prompts, one after the other; return figures and the tokens."""
    llm = LLM(
        "smollm2",
        dtype="float32",
        kv_memory_bytes=256 * MIB,
        num_speculative_tokens=tokens,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    ids = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    outputs = llm.generate(ids, params, sequential=True)
    stats, measured = llm.engine.core.stats(), llm.stats()
    accepted = stats.spec_decode_accepted_tokens
    made = stats.output_tokens
    return {
        "guessed_tokens_per_step": tokens,
        "output_tokens": made,
        "guesses": stats.spec_decode_draft_tokens,
        "accepted": accepted,
        "acceptance": accepted / max(1, stats.spec_decode_draft_tokens),
        "steps": stats.step,
        "tokens_per_target_step": made / stats.step,
        "output_tokens_per_second": measured["output_tokens_per_second"],
        "token_ids": [output.token_ids for output in outputs],
    }


def measure(counts: Sequence[int], max_tokens: int) -> dict[str, dict[str, Any]]:
    """Run without draft tokens, with lookup, and with a draft model; compare their answers."""
    runs = {"no guesses": answered(0, max_tokens)}
    runs |= {f"looked up, {n}": answered(n, max_tokens) for n in counts}
    last = counts[-1]
    runs[f"the model itself, {last} (plumbing)"] = answered(
        last, max_tokens, speculative_model="smollm2"
    )
    expected = runs["no guesses"]["token_ids"]
    for run in runs.values():
        run["same_tokens"] = run.pop("token_ids") == expected
    return runs


def table_of(runs: dict[str, dict[str, Any]]) -> Table:
    """A row for each way to draft."""
    table = Table(title="SmolLM2, float32, one request at a time")
    for name in ("guesses", "acceptance", "tokens per step", "tokens/s", "same tokens"):
        table.add_column(name, justify="left" if name == "guesses" else "right")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{run['acceptance']:.2f}",
            f"{run['tokens_per_target_step']:.2f}",
            f"{run['output_tokens_per_second']:.1f}",
            str(run["same_tokens"]),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--traces", type=Path, help="directory of traces to replay as well")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    figures: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if "engine" in options.parts:
        runs = measure(options.draft_tokens, options.max_tokens)
        console.print(table_of(runs))
        figures |= {"machine": machine.describe(), "engine": runs}
    if "replay" in options.parts:
        results = replays.measure(options.traces)
        console.print(replays.table_of(results))
        lines = replays.missed(results)
        console.print(replays.summary(results))
        console.print("\n".join(f"missed: {line}" for line in lines) or "All bounds are kept.")
        figures["replay"] = {
            "results": results,
            "summary": replays.summary(results),
            "missed": lines,
        }
    result_file.write(options.json, figures)


if __name__ == "__main__":
    main()
