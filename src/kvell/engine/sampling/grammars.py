"""Grammars that answers must follow: which tokens may come next, by llguidance.

A request's matcher reads its output and gives the tokens that may follow.  It is made anew from
the output when the request comes from another instance or was preempted, so nothing is lost.
Where an answer may reason first, the grammar begins behind that (:mod:`.reasoning`).
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.reasoning import ReasoningReader
from kvell.errors import ChangeSomething

Allowed = npt.NDArray[np.bool_]
KNOWN_GRAMMARS = 64
"""Compiled grammars that are kept: requests with the same schema come in crowds."""
JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Fixed spaces: a small model may otherwise write spaces until its tokens are used up."""


@dataclass(frozen=True)
class Wanted:
    """A request that draws a token under a grammar.

    :param output: its tokens so far, int32.
    """

    handle: int
    asked: StructuredOutputs
    output: npt.NDArray[np.int32]


class Grammars:
    """The grammars of one model's requests; masks are computed on a thread beside the step.

    :param tokenizer_json: gives the model's tokenizer as JSON text, in the form of the
        tokenizers library; called at the first use.
    :param vocab_size: of the model's logits.
    :param end_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_token_ids: Iterable[int],
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size, self._ends = vocab_size, sorted(end_token_ids)
        self._matchers: dict[int, _Matcher] = {}
        self._readers: dict[int, ReasoningReader] = {}
        self._known: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-grammars")

    def check(self, asked: StructuredOutputs) -> None:
        """Compile a grammar to see whether it can be followed.

        :raises ChangeSomething: naming the constraint and what is wrong with it.
        """
        field = f"structured_outputs.{asked.kind}"
        if not self._ends:
            why = "needs a token that ends texts, and the model names none"
            raise ChangeSomething(field, "…", why, "leave it out")
        if problem := self._thread.submit(self._problem, asked).result():
            text = " ".join(problem.split())[:300]
            raise ChangeSomething(field, "…", f"cannot be followed: {text}", "simplify it")

    def masks(self, wanted: Sequence[Wanted]) -> Future[dict[int, Allowed | None]]:
        """Begin to compute which tokens may come next for each request, by handle.

        The value is bool [vocabulary], or None where the grammar has become too complex.  A request
        that still reasons has none: any token may come next.
        """
        return self._thread.submit(self._masks, list(wanted))

    def release(self, handles: Iterable[int]) -> None:
        """Forget requests that hold no pages any more."""
        if self._matchers or self._readers:
            for handle in handles:
                self._matchers.pop(handle, None)
                self._readers.pop(handle, None)

    def _masks(self, wanted: Sequence[Wanted]) -> dict[int, Allowed | None]:
        bound = (self._behind_reasoning(one) for one in wanted)
        return {one.handle: self._mask(one) for one in bound if one is not None}

    def _behind_reasoning(self, wanted: Wanted) -> Wanted | None:
        """The same with what the grammar must read of its output; None while it still reasons."""
        if wanted.asked.reasoning is None:
            return wanted
        reader = self._readers.get(wanted.handle)
        if reader is None:
            reader = ReasoningReader(wanted.asked.reasoning, self._tokenizer)
            self._readers[wanted.handle] = reader
        behind = reader.behind(wanted.output)
        return None if behind is None else replace(wanted, output=behind)

    def _mask(self, wanted: Wanted) -> Allowed | None:
        matcher = self._matchers.get(wanted.handle)
        if matcher is None:
            matcher = _Matcher(self._compiled(wanted.asked).deep_copy(), self._ends)
            self._matchers[wanted.handle] = matcher
        mask = matcher.allowed(wanted.output, self._vocab_size, self._tokenizer.vocab_size)
        reader = self._readers.get(wanted.handle)
        if mask is not None and reader is not None and reader.start is not None:
            mask[reader.start : reader.start + 1] = True  # a model may lack it
        return mask

    def _problem(self, asked: StructuredOutputs) -> str:
        """What is wrong with a constraint; empty if nothing is."""
        try:
            problem: str = self._compiled(asked).get_error()
        except (ValueError, ChangeSomething) as error:
            return str(error)
        return problem

    def _compiled(self, asked: StructuredOutputs) -> Any:
        """A matcher at its start, to be copied; the latest ones are kept."""
        from llguidance import LLMatcher

        asked = asked.bare()
        if asked not in self._known:
            self._known[asked] = LLMatcher(self._tokenizer, _source(asked), log_level=0)
        self._known.move_to_end(asked)
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)
        return self._known[asked]

    @cached_property
    def _tokenizer(self) -> Any:
        # Imported here: most instances never see a grammar.
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer_json(), eos_token=self._ends)


class _Matcher:
    """One request's place in its grammar."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher, self._ends = matcher, np.array(ends, np.int64)
        self._read, self._is_broken = 0, False

    def allowed(self, output: npt.NDArray[np.int32], vocab_size: int, known: int) -> Allowed | None:
        """Read what is new of the output; the tokens that may follow it.

        None if there are none to tell: the grammar is too complex, or the output breaks it.

        :param known: tokens of the tokenizer; many models have logits for some more.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        fresh, self._read = output[self._read :], len(output)
        if len(fresh) and not self._matcher.is_stopped():
            consumed = self._matcher.try_consume_tokens(fresh.tolist())
            self._is_broken |= consumed < len(fresh) and not self._matcher.is_stopped()
        if self._is_broken or self._matcher.is_error():
            return None
        allowed = np.zeros(vocab_size, bool)
        if self._matcher.is_stopped():
            allowed[self._ends] = True
            return allowed
        words = allocate_token_bitmask(1, known)
        words[:] = 0
        fill_next_token_bitmask(self._matcher, words)
        if self._matcher.is_error():
            return None
        size = min(known, vocab_size)
        allowed[:size] = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        return allowed


def _source(asked: StructuredOutputs) -> str:
    """The constraint in llguidance's form.

    :raises ValueError: if a schema is not JSON.
    """
    from llguidance import LLMatcher

    if asked.json is not None or asked.json_object:
        schema = asked.json if asked.json is not None else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
    return LLMatcher.grammar_from_lark(f"start: {choices}")
