"""What a step and a request may at most be."""

from dataclasses import dataclass

MAX_STEP_DRAFT_TOKENS = 256
"""Every guess has a row of logits, which takes memory; and guesses only save time while a
step is so small that it waits for memory."""


@dataclass(frozen=True)
class Limits:
    """Constants of a run.

    :param max_num_batched_tokens: tokens computed in one step.
    :param max_num_seqs: requests running at once.
    :param max_model_len: prompt and output tokens of one request.
    :param vocab_size: token ids are below it.
    :param min_chunk_tokens: a prefill is admitted only if chunks of this size would fit.
    :param max_prefix_wait_steps: steps a request waits for another to compute its prefix.
    :param common_pool: protect prefixes that several requests share.
    :param common_pool_chunk_tokens: a protected prefix is a multiple of so many tokens.
    :param common_pool_share: part of the pool that may be; None: as replayed history says.
    :param num_speculative_tokens: tokens that a request may guess in one step (0: none).
    :param has_drafter: a draft model says the guesses when a step runs; else they are looked
        up in the text when it is planned.
    :param prompt_lookup_max: longest end of a text whose earlier occurrence gives guesses.
    :param prompt_lookup_min: shortest one.
    :param whole_images: an image's tokens in the text are computed in one step.
    :param enough_prompt_tokens: prompts are computed one after another: a further one joins a
        step only up to so many prompt tokens, which keep the device busy.  None: as many as the
        step may compute, which all have their first tokens when the last is done.
    :param crowded_prompt_tokens: of a step while decodes are parked for want of pages: as many
        as are computed in the time in which the other decodes read a full pool.  None: no bound.
    :param observing_tokens: the last ones of a prompt, computed in one step where they choose
        the tokens that its layers keep (0: none do).
    :param depth: results that a plan does not see yet (0: plan, run, commit in turn).
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 8192
    vocab_size: int = 1 << 31
    min_chunk_tokens: int = 64
    max_prefix_wait_steps: int = 64
    depth: int = 0
    common_pool: bool = False
    common_pool_chunk_tokens: int = 512
    common_pool_share: float | None = None
    num_speculative_tokens: int = 0
    has_drafter: bool = False
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    whole_images: bool = False
    observing_tokens: int = 0
    enough_prompt_tokens: int | None = None
    crowded_prompt_tokens: int | None = None

    @property
    def max_step_draft_tokens(self) -> int:
        """Guesses of all requests in one step at most."""
        return max_step_draft_tokens(self.max_num_seqs, self.num_speculative_tokens)


def max_step_draft_tokens(max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Guesses of all requests in one step at most."""
    return min(max_num_seqs * num_speculative_tokens, MAX_STEP_DRAFT_TOKENS)
