"""Upper limits of a step and a request."""

from dataclasses import dataclass
from functools import cached_property

from kvell.engine.protocol.statistics import ModelLengths
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, Layout
from kvell.vocabulary import SECTION_TOKENS

MAX_STEP_DRAFT_TOKENS = 256
"""Every draft token has a row of logits, which takes memory; and draft tokens save time only
while a step is small enough to be memory-bound."""


@dataclass(frozen=True)
class Limits:
    """Constants of a run.

    :param max_num_batched_tokens: tokens computed in one step.
    :param max_num_seqs: requests running at the same time.
    :param max_model_len: prompt and output tokens of one request.
    :param reach_tokens: the same for a request that borrows memory of other instances; 0: none can.
    :param section_tokens: tokens in a section, the unit of such loans.
    :param vocab_size: token ids are below it.
    :param min_chunk_tokens: a prefill is admitted only if chunks of this size would fit.
    :param max_prefix_wait_steps: steps a request waits for another to compute its prefix.
    :param common_pool: protect prefixes that several requests share.
    :param common_pool_chunk_tokens: length of a protected prefix is a multiple of it.
    :param common_pool_share: part of the pool that may be protected; None: chosen by replaying
        past requests.
    :param num_speculative_tokens: most draft tokens of a request in one step (0: none).
    :param has_drafter: a draft model proposes draft tokens when a step runs; else they are
        looked up in the text when it is planned.
    :param prompt_lookup_max: longest suffix of a text to look up for draft tokens.
    :param prompt_lookup_min: shortest one.
    :param whole_images: an image's tokens in the text are computed in one step.
    :param enough_prompt_tokens: prompt tokens that keep the device busy: another prompt joins a
        step only up to this number, so prompts are computed one after another.  None: up to the
        step's budget; prompts that share a step then all get their first tokens at its end.
    :param crowded_prompt_tokens: most prompt tokens of a step while decodes are parked for lack of
        pages: as many as are computed while the other decodes read a full pool.  None: no bound.
    :param observing_tokens: last tokens of a prompt, computed in one step because they choose
        the tokens that its layers keep (0: none do).
    :param depth: number of pending results that a plan may lack (0: plan, run, commit in turn).
    :param short_rope_tokens: longest text under the short one of two rotation tables (LongRoPE);
        0: there is one table.
    :param draft_tokens_end: the draft model's context, where draft tokens end; 0: it is no shorter
        than the model's.
    :param enable_chunked_prefill: prompts are cut into chunks, and decodes share their steps; else
        see :mod:`kvell.engine.planning.whole_prompts`.
    :param enable_prefix_caching: requests share the pages of equal prefixes; else each computes its
        whole prompt.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 8192
    reach_tokens: int = 0
    section_tokens: int = SECTION_TOKENS
    vocab_size: int = 1 << 31
    min_chunk_tokens: int = 64
    max_prefix_wait_steps: int = 64
    depth: int = 0
    short_rope_tokens: int = 0
    draft_tokens_end: int = 0
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
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True

    @property
    def max_step_draft_tokens(self) -> int:
        return max_step_draft_tokens(self.max_num_seqs, self.num_speculative_tokens)


def draft_tokens_end(own_tokens: int, draft_tokens: int | None) -> int:
    """Return where draft tokens end: the draft model's context; 0 if it is no shorter.

    :param own_tokens: the context of the model that answers.
    :param draft_tokens: that of its draft model; None without one.
    """
    return draft_tokens if draft_tokens is not None and draft_tokens < own_tokens else 0


def max_step_draft_tokens(max_num_seqs: int, num_speculative_tokens: int) -> int:
    return min(max_num_seqs * num_speculative_tokens, MAX_STEP_DRAFT_TOKENS)


@dataclass(frozen=True)
class ModelRules:
    """The rules of one model.

    :param name: name of the model in requests; "" if an engine has only one model.
    :param limits: limits of the engine, with the lengths and token ids of this model.
    :param layout: the pool with the groups that its requests hold pages of.
    :param has_head: whether the model writes text; if not, it serves embeddings alone.
    """

    name: str
    limits: Limits
    eos_token_ids: frozenset[int]
    layout: Layout
    takes_images: bool = True
    has_head: bool = True

    def lengths(self, *, borrows: bool) -> ModelLengths:
        """Return the longest requests."""
        reach_tokens = self.limits.reach_tokens if borrows else 0
        return ModelLengths(self.limits.max_model_len, reach_tokens)

    def head_problem(self, model: str) -> ChangeSomething | None:
        """Return the refusal of a request for text to a model without a head, or None."""
        if self.has_head:
            return None
        problem = "cannot write text: tie_word_embeddings is false, and no file has lm_head.weight"
        remedy = "ask for embeddings, or use a checkpoint with lm_head.weight"
        return ChangeSomething("model", model, problem, remedy)

    @cached_property
    def has_states(self) -> bool:
        """Whether the model has state layers, which cannot be rolled back past a draft token."""
        return any(group.kind is GroupKind.STATE for group in self.layout.groups)
