"""Seeded traces of named kinds: the same name, count and seed give the same rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvell.errors import ChangeSomething
from kvell.simulator.traces.drawing import (
    REQUESTS_PER_SECOND,
    Draw,
    NewIds,
    draw_related,
    draw_unrelated,
    poisson_arrivals,
)
from kvell.simulator.traces.lengths import INFINITE_LLM, K, contexts, fixed_lengths
from kvell.simulator.traces.rows import BlockIds, ImageRow, TraceRow
from kvell.simulator.traces.sessions import loogle_like, next_turn, react_like, sharegpt_like

SYSTEM_BLOCK_TOKENS = 16
SYSTEM_PROMPT_TOKENS = (128, 256, 512, 1_024)
TEMPLATE_TOKENS = 4
"""Tokens that mark a turn, in addition to its text."""
LAST_TURN = 0.25
"""Chance that a turn is the last: four turns on average."""
MAX_ANSWER_TOKENS = 1_000
MEAN_PAUSE_SECONDS = 30.0
"""Mean time from one turn of a conversation to the next."""


def chat(draw: Draw, count: int) -> list[TraceRow]:
    """Generate conversations of about four turns after one of four system prompts.

    Of 1,000 turns with seed 0: prompts have 1,621 tokens on average (139 to 7,416), answers 198; an
    unbounded cache hits 90 % of the prompt tokens.
    """
    rows: list[TraceRow] = []
    ids = NewIds()
    systems = [ids.take(length // SYSTEM_BLOCK_TOKENS) for length in SYSTEM_PROMPT_TOKENS]
    while len(rows) < count:
        rows += _conversation(draw, systems[int(draw.integers(len(systems)))], len(rows))
    return sorted(rows[:count], key=lambda row: row.arrival_s)


def _conversation(draw: Draw, system: BlockIds, before: int) -> list[TraceRow]:
    now_s = before / REQUESTS_PER_SECOND * float(draw.uniform(0.5, 1.5))
    rows = [_first_turn(draw, system, now_s, f"chat-{before}")]
    for _ in range(int(draw.geometric(LAST_TURN)) - 1):
        pause_s = float(draw.exponential(MEAN_PAUSE_SECONDS))
        rows.append(next_turn(rows[-1], _question_tokens(draw), _answer_tokens(draw), pause_s))
    return rows


def _first_turn(draw: Draw, system: BlockIds, now_s: float, session: str) -> TraceRow:
    prompt = len(system) * SYSTEM_BLOCK_TOKENS + _question_tokens(draw)
    return TraceRow(now_s, prompt, _answer_tokens(draw), system, SYSTEM_BLOCK_TOKENS, session)


def _question_tokens(draw: Draw) -> int:
    return int(draw.lognormal(4.5, 1.0)) + TEMPLATE_TOKENS


def _answer_tokens(draw: Draw) -> int:
    return min(MAX_ANSWER_TOKENS, int(draw.lognormal(5.0, 0.8)) + 1)


Maker = Callable[[Draw, int], list[TraceRow]]

TEXT_BLOCK_TOKENS = 16
ARTICLE_BLOCK_TOKENS = 64
ARTICLE_MEAN_TOKENS = 92_408
"""Mean prompt of arXiv-QA in the Jenga paper."""
ARTICLE_SPREAD = (0.65, 1.35)
"""Shortest and longest article, as parts of the mean."""
QUESTIONS_PER_ARTICLE = 5
QUESTION_TOKENS = (20, 80)
EXAM_SUBJECTS = 14
MINISTRAL_PROMPT_TOKENS = (55_000, 110_000)
MINISTRAL_OUTPUT_TOKENS = (50, 100)
IMAGE_TOKENS, IMAGE_QUESTION_TOKENS = 6_193, 43
"""Means of MMMU-pro in the Jenga paper."""
REPEATED_IMAGES = 0.1
"""Part of the requests about an image of an earlier request."""
TREE_PREFIX_TOKENS = (1, 16_000)
TREE_USERS = (2, 6)


def generate_trace(name: str, count: int | None = None, seed: int = 0) -> list[TraceRow]:
    """Generate ``count`` requests of a named kind, sorted by arrival; None takes the usual count.

    :raises ChangeSomething: for an unknown name.
    """
    if name not in GENERATORS:
        names = ", ".join(GENERATORS)
        raise ChangeSomething("--trace", name, "is neither a file nor a generator", f"use {names}")
    kind = GENERATORS[name]
    return kind.make(np.random.default_rng(seed), kind.usual_count if count is None else count)


def long_documents(draw: Draw, count: int) -> list[TraceRow]:
    """Generate unrelated documents of 8 K to 128 K tokens, uniform on a logarithmic scale."""
    lengths = np.exp(draw.uniform(np.log(8_192), np.log(131_072), count)).astype(np.int64)
    outputs = draw.integers(100, 1_000, count, endpoint=True)
    return draw_unrelated(poisson_arrivals(draw, count), lengths, outputs)


def arxiv_qa(draw: Draw, count: int) -> list[TraceRow]:
    """Generate articles with five questions each; the mean prompt is the paper's 92,408 tokens.

    Of 200 requests with seed 0: 58,730 to 121,462 tokens; an unbounded cache hits 80 %.
    """
    articles = -(-count // QUESTIONS_PER_ARTICLE)
    shape = draw.uniform(*ARTICLE_SPREAD, articles)
    questions = draw.integers(*QUESTION_TOKENS, count, endpoint=True)
    of = draw.permutation(count) // QUESTIONS_PER_ARTICLE
    article_tokens = ARTICLE_MEAN_TOKENS - questions.mean()
    lengths = np.rint(shape * article_tokens / shape[of].mean()).astype(np.int64)
    ids = NewIds()
    arrivals = poisson_arrivals(draw, count)
    texts = [ids.take(int(length) // ARTICLE_BLOCK_TOKENS) for length in lengths]
    outputs = draw.integers(50, 200, count, endpoint=True)
    named = [texts[article] for article in of.tolist()]
    return draw_related(arrivals, lengths[of] + questions, outputs, named, ARTICLE_BLOCK_TOKENS)


def mmlu_pro(draw: Draw, count: int) -> list[TraceRow]:
    """Generate exam questions after worked examples, at most the paper's 3,076 tokens.

    Of 1,000 requests with seed 0: 703 to 2,748 tokens, mean 1,459; an unbounded cache hits 83 %.
    """
    ids = NewIds()
    arrivals = poisson_arrivals(draw, count)
    blocks = draw.integers(600, 2_200, EXAM_SUBJECTS, endpoint=True) // TEXT_BLOCK_TOKENS
    examples = [ids.take(int(n)) for n in blocks]
    questions = np.minimum(draw.lognormal(5.2, 0.6, count).astype(np.int64) + 20, 876)
    outputs = draw.integers(16, 256, count, endpoint=True)
    subjects = draw.integers(0, EXAM_SUBJECTS, count)
    prompts = blocks[subjects] * TEXT_BLOCK_TOKENS + questions
    named = [examples[subject] for subject in subjects.tolist()]
    return draw_related(arrivals, prompts, outputs, named, TEXT_BLOCK_TOKENS)


def ministral_static(draw: Draw, count: int) -> list[TraceRow]:
    """Generate prompts of 55,000 to 110,000 tokens, uniform, that all wait at the start.

    Outputs have 50 to 100 tokens. Twenty are the workload of the Jenga paper's figure 15.
    """
    lengths = draw.integers(*MINISTRAL_PROMPT_TOKENS, count, endpoint=True)
    outputs = draw.integers(*MINISTRAL_OUTPUT_TOKENS, count, endpoint=True)
    return draw_unrelated(np.zeros(count), lengths, outputs)


def ministral_dynamic(draw: Draw, count: int) -> list[TraceRow]:
    """Generate long prompts that grow along the trace from the shortest to the longest, ±5 %."""
    low, high = MINISTRAL_PROMPT_TOKENS
    wanted = np.linspace(low, high, count) * draw.uniform(0.95, 1.05, count)
    outputs = draw.integers(*MINISTRAL_OUTPUT_TOKENS, count, endpoint=True)
    return draw_unrelated(np.zeros(count), np.clip(wanted, low, high).astype(np.int64), outputs)


def mmmu_pro(draw: Draw, count: int) -> list[TraceRow]:
    """Generate exam questions, each after its image; some are about the same image.

    Every request has the mean lengths of MMMU-pro in the Jenga paper: 6,193 image tokens and 43
    text tokens, so that figures derived from the means hold for each request.
    """
    arrivals = poisson_arrivals(draw, count)
    images = _image_ids(draw, count)
    outputs = draw.integers(4, 64, count, endpoint=True)
    return [
        TraceRow(
            float(at),
            IMAGE_QUESTION_TOKENS,
            int(output),
            images=(ImageRow(0, IMAGE_TOKENS, image),),
        )
        for at, output, image in zip(arrivals, outputs, images, strict=True)
    ]


def tree(draw: Draw, count: int) -> list[TraceRow]:
    """Generate prefixes of uniformly 1 to 16,000 tokens, each shared by 2 to 6 requests at random.

    An id names a single token, so that prefixes may end anywhere; every request adds 1 to 500
    tokens of its own. ``ideal_hit_tokens`` counts every prefix except at its first use: 73 % of the
    tokens of 400 requests with seed 0.
    """
    ids = NewIds()
    prefixes = list[BlockIds]()
    for users in _family_sizes(draw, count):
        prefixes += [ids.take(int(draw.integers(*TREE_PREFIX_TOKENS, endpoint=True)))] * users
    tails = draw.integers(1, 500, count, endpoint=True)
    outputs = draw.integers(20, 200, count, endpoint=True)
    named = [prefixes[family] for family in draw.permutation(count).tolist()]
    prompts = np.array([len(prefix) for prefix in named]) + tails
    return draw_related(poisson_arrivals(draw, count), prompts, outputs, named, 1)


@dataclass(frozen=True)
class TraceKind:
    """A generator and the number of requests it makes by default."""

    make: Maker
    usual_count: int


GENERATORS = {
    "chat": TraceKind(chat, 1_000),
    "long-documents": TraceKind(long_documents, 100),
    "arxiv-qa": TraceKind(arxiv_qa, 200),
    "mmlu-pro": TraceKind(mmlu_pro, 1_000),
    "mmmu-pro": TraceKind(mmmu_pro, 500),
    "ministral-static": TraceKind(ministral_static, 20),
    "ministral-dynamic": TraceKind(ministral_dynamic, 20),
    "tree": TraceKind(tree, 400),
    "sharegpt-like": TraceKind(sharegpt_like, 1_000),
    "loogle-like": TraceKind(loogle_like, 1_000),
    "react-like": TraceKind(react_like, 1_000),
    "2k-2k": TraceKind(fixed_lengths(2 * K, 2 * K), 500),
    "32k-2k": TraceKind(fixed_lengths(32 * K, 2 * K), 100),
    "128k-8k": TraceKind(fixed_lengths(128 * K, 8 * K), 50),
    **{
        f"infinite-{number}": TraceKind(contexts(lengths), 1_000)
        for number, lengths in enumerate(INFINITE_LLM)
    },
}
"""Names that may be given instead of a trace file."""


def _image_ids(draw: Draw, count: int) -> list[int]:
    ids: list[int] = []
    new = 0
    for again in draw.random(count) < REPEATED_IMAGES:
        if again and new:
            ids.append(int(draw.integers(new)))
        else:
            ids.append(new)
            new += 1
    return ids


def _family_sizes(draw: Draw, count: int) -> list[int]:
    """Draw sizes within ``TREE_USERS`` that add up to ``count`` (≥ 2)."""
    low, high = TREE_USERS
    sizes = list[int]()
    left = count
    while left:
        size = min(left, int(draw.integers(low, high, endpoint=True)))
        if 0 < left - size < low:
            size += 1 if size < high else -1
        sizes.append(size)
        left -= size
    return sizes
