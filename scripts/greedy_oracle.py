"""What transformers' greedy ``generate`` says to the committed prompts: the oracle of the tests.

Writes one JSON line per prompt: the token ids of the prompt and of the answer, and
where the oracle's two best logits are closer than 1e-4 of the largest (a position
at which float32 may round either way).

    python scripts/greedy_oracle.py --prompts tests/data/smollm2_prompts.jsonl \\
        --out tests/data/smollm2_greedy.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvell.models.sources.packaged import packaged_model


def near_ties(scores: tuple[torch.Tensor, ...]) -> list[int]:
    """Output positions whose two best logits are closer than 1e-4 of the largest."""
    ties = []
    for position, logits in enumerate(scores):
        best, second = logits[0].float().topk(2).values.tolist()
        if best - second < 1e-4 * float(logits.abs().max()):
            ties.append(position)
    return ties


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    options = parser.parse_args()
    path = packaged_model(options.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with options.out.open("w") as out:
        for line in options.prompts.read_text().splitlines():
            ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids
            made = model.generate(
                ids,
                do_sample=False,
                max_new_tokens=options.max_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
            answer = made.sequences[0, ids.shape[1] :].tolist()
            row = {"prompt_token_ids": ids[0].tolist(), "token_ids": answer}
            out.write(json.dumps({**row, "near_ties": near_ties(made.logits)}) + "\n")


if __name__ == "__main__":
    main()
