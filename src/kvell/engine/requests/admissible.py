"""Checks whether a request can be served at all, in the front and in the engine."""

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.memory import Facts, Layout, facts_of, fits_alone


def prompt_problem(
    prompt: npt.NDArray[np.int32], limits: Limits, output_tokens: int = 1
) -> ChangeSomething | None:
    """Return what the user must change about a prompt (int32 [n]); None if it can be served.

    :param output_tokens: number of tokens that must fit after the prompt, 0 or 1.
    """
    if not len(prompt):
        return ChangeSomething("prompt", "''", "has no tokens", "give at least one")
    longest = limits.max_model_len - output_tokens
    if len(prompt) > longest:
        problem = "leaves no room for output in" if output_tokens else "is longer than"
        return ChangeSomething(
            "prompt",
            f"{len(prompt)} tokens",
            f"{problem} --max-model-len {limits.max_model_len}",
            f"shorten it to {longest} tokens or raise --max-model-len",
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= limits.vocab_size:
        return _unknown_token("prompt", low if low < 0 else high, limits)
    return None


def output_problem(output: npt.NDArray[np.int32], limits: Limits) -> ChangeSomething | None:
    """Return what is wrong with an earlier attempt's output (int32 [n]); None if it is valid."""
    wrong = output[(output < 0) | (output >= limits.vocab_size)]
    return _unknown_token("output", int(wrong[0]), limits) if len(wrong) else None


def _unknown_token(field: str, token: int, limits: Limits) -> ChangeSomething:
    problem, remedy = "holds an id that is not a token of this model", "use ids from 0 to"
    return ChangeSomething(field, f"[… {token} …]", problem, f"{remedy} {limits.vocab_size - 1}")


def sampling_problem(
    sampling: SamplingParams, limits: Limits, has_images: bool
) -> ChangeSomething | None:
    """Return what is wrong with sampling for this model; None if it can be served."""
    forms = sampling.bad_words_token_ids
    if sampling.bad_words and not forms:
        problem = "needs the model's tokenizer, and it has none"
        return ChangeSomething("bad_words", sampling.bad_words[0], problem, "leave it out")
    for field, tokens in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", tuple(token for form in forms for token in form)),
    ):
        unknown = max(tokens, default=0)
        if unknown >= limits.vocab_size:
            problem = "is not a token of this model"
            remedy = f"use ids below {limits.vocab_size}"
            return ChangeSomething(field, unknown, problem, remedy)
    if has_images and sampling.prompt_logprobs is not None:
        problem = "are not served for prompts with images"
        return ChangeSomething(
            "prompt_logprobs", sampling.prompt_logprobs, problem, "leave them out"
        )
    if sampling.prompt_logprobs is not None and limits.observing_tokens >= limits.max_num_seqs:
        least = limits.observing_tokens + 1
        problem = f"need a row of logits for each of the last {least - 1} tokens of a prompt"
        remedy = f"leave them out or use --max-num-seqs {least}"
        return ChangeSomething("prompt_logprobs", sampling.prompt_logprobs, problem, remedy)
    return None


def request_problem(
    prompt: npt.NDArray[np.int32],
    images: tuple[tuple[int, int, int], ...],
    max_tokens: int,
    limits: Limits,
    layout: Layout,
) -> ChangeSomething | None:
    """Return what the user must change about a prompt and its images; None if it can be served."""
    if not images:
        return prompt_problem(prompt, limits)
    length = min(limits.max_model_len, len(prompt) + max_tokens)
    problem = images_problem(prompt, images, limits, layout, length)
    text = prompt[prompt >= 0]
    return problem or (prompt_problem(text, limits) if len(text) else None)


def images_problem(
    prompt: npt.NDArray[np.int32],
    images: tuple[tuple[int, int, int], ...],
    limits: Limits,
    layout: Layout,
    length: int,
) -> ChangeSomething | None:
    """Return what the user must change about a prompt's images; None if they can be served.

    :param images: (first token in the prompt, tokens there, image tokens).
    :param length: tokens that prompt and output will have together.
    """
    try:
        facts = facts_of(len(prompt), None, np.asarray(images, np.int32))
    except (ValueError, OverflowError) as error:
        return ChangeSomething("images", images, str(error), "give each its own tokens, in order")
    inside = np.zeros(len(prompt), np.bool_)
    for image in facts.images:
        inside[image.start : image.end] = True
    if not np.array_equal(inside, prompt < 0):
        return ChangeSomething(
            "images", images, "differ from the prompt's image tokens", "name every one of them"
        )
    if len(prompt) >= limits.max_model_len:
        return prompt_problem(np.abs(prompt) % limits.vocab_size, limits)
    whole_tokens = max(i.tokens for i in facts.images) if limits.whole_images else 0
    if whole_tokens > limits.max_num_batched_tokens:
        return ChangeSomething(
            "prompt",
            f"{whole_tokens} tokens",
            "attend to each other in both directions, so one step computes them all; its most is "
            f"{limits.max_num_batched_tokens}",
            f"shorten it or use --max-num-batched-tokens {whole_tokens}",
        )
    chunk_tokens = max(limits.min_chunk_tokens, whole_tokens)
    if not fits_alone(layout, Facts(len(prompt), facts.images), length, chunk_tokens):
        return ChangeSomething(
            "images",
            f"{sum(image.image_tokens for image in facts.images)} image tokens",
            "do not fit into KV memory with the text",
            "use fewer or smaller images, or more --kv-memory",
        )
    return None


LAST: Pooling = "last"


def served_pooling(pooling: str) -> Pooling:
    """Return the pooling that a user asked for.

    :raises ChangeSomething: if it is not served.
    """
    if pooling != LAST:
        problem = "is not served: a cached prefix keeps only keys and values"
        raise ChangeSomething("pooling", str(pooling)[:40], problem, f"use {LAST}")
    return LAST


def pooling_problem(
    prompt: npt.NDArray[np.int32], limits: Limits, *, has_images: bool
) -> ChangeSomething | None:
    """Return what the user must change about a prompt (int32 [n]); None if it can have a vector.

    Only the vector of the last token is served.  A mean over all tokens needs every token's hidden
    state, but a cached prefix has only keys and values: it would have to be recomputed.

    The prompt may be as long as a request, since no output follows.
    """
    if has_images:
        problem = "cannot be part of an embedded prompt"
        return ChangeSomething("images", "…", problem, "leave them out, or generate instead")
    return prompt_problem(prompt, limits, output_tokens=0)
