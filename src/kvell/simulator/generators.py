"""Seeded traces of named kinds: the same name, count and seed give the same rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvell.errors import ChangeSomething
from kvell.simulator.trace import BlockIds, TraceRow

Draw = np.random.Generator
Maker = Callable[[Draw, int], list[TraceRow]]

REQUESTS_PER_SECOND = 5.0
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
TREE_PREFIX_TOKENS = (1, 16_000)
TREE_USERS = (2, 6)


def generate_trace(name: str, count: int | None = None, seed: int = 0) -> list[TraceRow]:
    """``count`` requests of a named kind, sorted by arrival; None means as many as is usual.

    :raises ChangeSomething: for an unknown name.
    """
    if name not in GENERATORS:
        known = ", ".join(GENERATORS)
        raise ChangeSomething("--trace", name, "is no file and no generator", f"use {known}")
    kind = GENERATORS[name]
    return kind.make(np.random.default_rng(seed), kind.usual_count if count is None else count)


def chat(draw: Draw, count: int) -> list[TraceRow]:
    """Conversations of several turns; each prompt is all that was said before, and a question."""
    rows: list[TraceRow] = []
    ids = _Ids()
    systems = [ids.take(length // TEXT_BLOCK_TOKENS) for length in (128, 256, 512, 1024)]
    while len(rows) < count:
        rows += _conversation(draw, ids, systems[int(draw.integers(len(systems)))], len(rows))
    return sorted(rows[:count], key=lambda row: row.arrival_s)


def long_documents(draw: Draw, count: int) -> list[TraceRow]:
    """Unrelated documents of 8 K to 128 K tokens, evenly on a logarithmic scale."""
    lengths = np.exp(draw.uniform(np.log(8_192), np.log(131_072), count)).astype(np.int64)
    outputs = draw.integers(100, 1_000, count, endpoint=True)
    return _rows(_arrivals(draw, count), lengths, outputs)


def arxiv_qa(draw: Draw, count: int) -> list[TraceRow]:
    """Articles, each with several questions; the mean prompt is the paper's."""
    articles = -(-count // QUESTIONS_PER_ARTICLE)
    shape = draw.uniform(*ARTICLE_SPREAD, articles)
    questions = draw.integers(*QUESTION_TOKENS, count, endpoint=True)
    of = draw.permutation(count) // QUESTIONS_PER_ARTICLE
    article_tokens = ARTICLE_MEAN_TOKENS - questions.mean()
    lengths = np.rint(shape * article_tokens / shape[of].mean()).astype(np.int64)
    ids, arrivals = _Ids(), _arrivals(draw, count)
    texts = [ids.take(int(length) // ARTICLE_BLOCK_TOKENS) for length in lengths]
    outputs = draw.integers(50, 200, count, endpoint=True)
    return [
        TraceRow(
            float(arrivals[i]),
            int(lengths[article] + questions[i]),
            int(outputs[i]),
            texts[article],
            ARTICLE_BLOCK_TOKENS,
        )
        for i, article in enumerate(of.tolist())
    ]


def mmlu_pro(draw: Draw, count: int) -> list[TraceRow]:
    """Exam questions behind their subject's worked examples."""
    ids, arrivals = _Ids(), _arrivals(draw, count)
    blocks = draw.integers(600, 2_200, EXAM_SUBJECTS, endpoint=True) // TEXT_BLOCK_TOKENS
    examples = [ids.take(int(n)) for n in blocks]
    questions = np.minimum(draw.lognormal(5.2, 0.6, count).astype(np.int64) + 20, 876)
    outputs = draw.integers(16, 256, count, endpoint=True)
    subjects = draw.integers(0, EXAM_SUBJECTS, count).tolist()
    return [
        TraceRow(
            float(arrivals[i]),
            len(examples[subject]) * TEXT_BLOCK_TOKENS + int(questions[i]),
            int(outputs[i]),
            examples[subject],
            TEXT_BLOCK_TOKENS,
        )
        for i, subject in enumerate(subjects)
    ]


def ministral_static(draw: Draw, count: int) -> list[TraceRow]:
    """Long prompts that all wait at the start, their lengths drawn alike."""
    lengths = draw.integers(*MINISTRAL_PROMPT_TOKENS, count, endpoint=True)
    outputs = draw.integers(*MINISTRAL_OUTPUT_TOKENS, count, endpoint=True)
    return _rows(np.zeros(count), lengths, outputs)


def ministral_dynamic(draw: Draw, count: int) -> list[TraceRow]:
    """Long prompts that grow along the trace from the shortest to the longest, ±5 %."""
    low, high = MINISTRAL_PROMPT_TOKENS
    wanted = np.linspace(low, high, count) * draw.uniform(0.95, 1.05, count)
    outputs = draw.integers(*MINISTRAL_OUTPUT_TOKENS, count, endpoint=True)
    return _rows(np.zeros(count), np.clip(wanted, low, high).astype(np.int64), outputs)


def tree(draw: Draw, count: int) -> list[TraceRow]:
    """Prefixes of any length, each shared by two to six requests, in random order."""
    ids, families = _Ids(), list[BlockIds]()
    while len(families) < count:
        prefix = ids.take(int(draw.integers(*TREE_PREFIX_TOKENS, endpoint=True)))
        families += [prefix] * int(draw.integers(*TREE_USERS, endpoint=True))
    tails = draw.integers(1, 500, count, endpoint=True)
    outputs = draw.integers(20, 200, count, endpoint=True)
    order, arrivals = draw.permutation(count).tolist(), _arrivals(draw, count)
    return [
        TraceRow(
            float(arrivals[i]),
            len(families[family]) + int(tails[i]),
            int(outputs[i]),
            families[family],
            1,
        )
        for i, family in enumerate(order)
    ]


@dataclass(frozen=True)
class TraceKind:
    """A generator and how many requests it makes unless told."""

    make: Maker
    usual_count: int


GENERATORS = {
    "chat": TraceKind(chat, 1_000),
    "long-documents": TraceKind(long_documents, 100),
    "arxiv-qa": TraceKind(arxiv_qa, 200),
    "mmlu-pro": TraceKind(mmlu_pro, 1_000),
    "ministral-static": TraceKind(ministral_static, 20),
    "ministral-dynamic": TraceKind(ministral_dynamic, 20),
    "tree": TraceKind(tree, 400),
}
"""Names that may stand for a trace file."""


class _Ids:
    """Hands out block ids that nobody has had."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> BlockIds:
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64)


def _conversation(draw: Draw, ids: _Ids, system: BlockIds, before: int) -> list[TraceRow]:
    """Answers have ids where a later prompt repeats them, as in recorded traces."""
    now_s = before / REQUESTS_PER_SECOND * float(draw.uniform(0.5, 1.5))
    said_tokens, blocks, rows = len(system) * TEXT_BLOCK_TOKENS, system, list[TraceRow]()
    for turn in range(int(draw.geometric(0.25))):
        said_tokens += int(draw.lognormal(4.5, 1.0)) + 4
        new = said_tokens // TEXT_BLOCK_TOKENS - len(blocks)
        blocks = np.concatenate([blocks, ids.take(new)])
        output = min(1_000, int(draw.lognormal(5.0, 0.8)) + 1)
        now_s += float(draw.exponential(30.0)) if turn else 0.0
        rows.append(TraceRow(now_s, said_tokens, output, blocks, TEXT_BLOCK_TOKENS, str(before)))
        said_tokens += output
    return rows


def _arrivals(draw: Draw, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    arrivals = np.cumsum(draw.exponential(1 / REQUESTS_PER_SECOND, count))
    return arrivals - arrivals[0] if count else arrivals


def _rows(
    arrivals: np.ndarray[tuple[int], np.dtype[np.float64]],
    lengths: BlockIds,
    outputs: BlockIds,
) -> list[TraceRow]:
    return [
        TraceRow(float(at), int(prompt), int(output))
        for at, prompt, output in zip(arrivals, lengths, outputs, strict=True)
    ]
