"""A request's sampling parameters; validated once, at the edge."""

import copy
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from itertools import count
from math import isfinite
from typing import Any, Self

from typing_extensions import override

from kvell.engine.protocol.given import biases, flag, number, texts, token_ids, whole
from kvell.engine.protocol.logprobs import MAX_LOGPROBS
from kvell.engine.protocol.structured_outputs import ReasoningBudget, StructuredOutputs
from kvell.equivalents.arguments import SAMPLING_OTHERS
from kvell.equivalents.other import refuses_unknown, show
from kvell.errors import ChangeSomething

ALL_TOKENS = -1
"""The value of ``repeat_last_n`` for all tokens."""
MAX_SEED = 2**63 - 1
SEED_BYTES = 7
"""The size of seeds that are derived; they are below ``MAX_SEED``."""
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_PENALTY = 2.0
LEAST_REPETITION_PENALTY = 1e-6
"""The smallest repetition penalty: division by a smaller one would make logits infinite."""


NO_SEED = -1
"""The seed that stands for none, as in vLLM."""


def _how_many(name: str, value: Any) -> int | None:
    """Return the number of likeliest tokens: 1 for True, None for False, as in vLLM."""
    if isinstance(value, bool):
        return 1 if value else None
    return whole(name, value)


class RequestOutputKind(Enum):
    """The content of each output of a streamed request: all of the answer so far, only what is
    new, or the whole answer in a single output."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _constraint(name: str, value: object) -> StructuredOutputs:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return StructuredOutputs(**value)
    if not isinstance(value, StructuredOutputs):
        remedy = 'give StructuredOutputs(…), or a mapping like {"choice": ["a", "b"]}'
        raise ChangeSomething(name, show(value), "is not a constraint", remedy)
    return value


def _output_kind(name: str, value: object) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        remedy = "use RequestOutputKind.DELTA, CUMULATIVE or FINAL_ONLY"
        raise ChangeSomething(name, show(value), "is not a kind of outputs", remedy)
    return value


@refuses_unknown(SAMPLING_OTHERS, {"guided_decoding": "structured_outputs"})
@dataclass
class SamplingParams:
    """Sampling parameters with vLLM's names and defaults.

    A field may be assigned; all fields are then checked again.  Requests in progress keep the
    parameters with which they began.

    :param temperature: 0 is greedy; otherwise logits are divided by it, up to 100.
    :param top_k: keep the k most likely tokens; 0 or -1 keeps all.
    :param top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
    :param min_p: drop tokens below this fraction of the most likely token's probability, in [0, 1].
    :param presence_penalty: is subtracted from the logits of all tokens in the output; from -2
        to 2.
    :param frequency_penalty: is subtracted from the logit of a token once for each time that the
        output has it; from -2 to 2.
    :param repetition_penalty: divides the positive logits of tokens in prompt and output, and
        multiplies the negative ones (Keskar et al., 2019); above 0 and up to 100.
    :param repeat_last_n: penalties look only at this number of last tokens of prompt and output;
        -1: at all of them, 0: at none.
    :param logit_bias: is added to the logits of tokens, by token id; from -100 to 100, at most
        1,024 tokens.
    :param min_tokens: the answer does not end before it has this number of tokens.
    :param logprobs: return the logprob of each output token, and of this number of likeliest
        tokens, at most 20.
    :param prompt_logprobs: return the logprob of each token of the prompt, from the second on, and
        of this number of likeliest tokens, at most 20.  Such a prompt is computed whole: it reuses
        no cached prefix.
    :param structured_outputs: constraint on the answer's text, or a mapping of its arguments.
    :param seed: with it, output token i depends on (seed, i) and the logits alone; without, a
        seed is drawn.
    :param max_tokens: most output tokens; None: up to the model's limit.
    :param stop: the answer ends before the first of these strings, at most 16.
    :param stop_token_ids: the answer ends after any of these tokens.
    :param ignore_eos: continue after the model's end-of-sequence token.
    :param n: number of answers, at most 128; each is a separate request, and all share the
        prompt's pages.
    :param bad_words: texts that may not occur in the answer, at most 128 of up to 256 characters,
        each with and without a space before it: a text's last token is not drawn if the output
        ends with the tokens before it.
    :param allowed_token_ids: only these tokens are drawn, at most 16,384; None allows all.
    :param include_stop_str_in_output: the text includes the stop string, or the stop token's text,
        that ended it.
    :param skip_special_tokens: whether special tokens are left out of the text.
    :param bad_words_token_ids: tokens of ``bad_words``, filled in where the tokenizer is.
    :param will_return: a hint that changes no answer: whether a later prompt will begin with
        this one (the conversation continues).  False ends a session; None is no hint.
        Prefixes that are expected to return are cached longer if eviction learns from returns.
    :param reasoning_budget: number of tokens of reasoning after which the engine ends it.
    :param output_kind: content of each output of :meth:`kvell.AsyncEngine.generate`.
    :raises ChangeSomething: naming the field that is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    will_return: bool | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reasoning_budget: ReasoningBudget | None = None
    repeat_last_n: int = ALL_TOKENS
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field and check all of them; nothing changes if one is out of range."""
        if _LAST not in self.__dict__:  # the constructor assigns the fields in order
            object.__setattr__(self, name, value)
            return
        checked = replace(self, **{name: value})
        self.__dict__.clear()  # with what was derived from the fields
        self.__dict__.update(checked.__dict__)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Return parameters with these values; unlike the constructor, it takes no other names.

        :raises ChangeSomething: naming the field that is out of range.
        """
        made = cls.__new__(cls)
        made.__dict__.update(UNSET)
        made.__dict__.update(values)
        made.__post_init__()
        return made

    def clone(self) -> Self:
        """Return a copy, which later assignments do not change."""
        return copy.copy(self)

    def reseeded(self, seed: int) -> Self:
        """Return a copy with another seed, which is in its range."""
        copied = copy.copy(self)
        copied.__dict__["seed"] = seed
        return copied

    def __post_init__(self) -> None:
        for name, default in DEFAULTS.items():
            value = getattr(self, name)
            if value is None:
                self.__dict__[name] = default
            elif value is not default and type(value) is not PLAIN_TYPES.get(name):
                self.__dict__[name] = READERS[name](name, value)
        if self.seed == NO_SEED:
            object.__setattr__(self, "seed", None)

        def refuse(field: str, problem: str, remedy: str) -> None:
            raise ChangeSomething(field, getattr(self, field), problem, remedy)

        if not 0.0 <= self.temperature <= 100.0:
            refuse("temperature", "must be between 0 and 100", "use 0 for greedy or 0.7")
        if self.top_k < -1:
            refuse("top_k", "must be -1 or more", "use 0 to keep all tokens")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "must be above 0 and at most 1", "use 1 to keep all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            refuse("min_p", "must be between 0 and 1", "use 0 to keep all tokens")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                refuse(name, f"must be between -{MAX_PENALTY} and {MAX_PENALTY}", "use 0 for none")
        if not LEAST_REPETITION_PENALTY <= self.repetition_penalty <= 100.0:
            problem = f"must be between {LEAST_REPETITION_PENALTY} and 100"
            refuse("repetition_penalty", problem, "use 1 for none")
        if self.repeat_last_n < ALL_TOKENS:
            refuse("repeat_last_n", "must be -1 or more", "use -1 for all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", "must be at least 1", "use 1 or more")
        if self.min_tokens < 0 or self.min_tokens > (self.max_tokens or self.min_tokens):
            refuse("min_tokens", "must be between 0 and max_tokens", "use 0 for no minimum")
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                refuse(name, f"must be between 0 and {MAX_LOGPROBS}", "leave it out for none")
        if not 1 <= self.n <= MAX_CHOICES:
            refuse("n", f"must be between 1 and {MAX_CHOICES}", "use 1 for one answer")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            refuse("seed", f"must be between 0 and {MAX_SEED}", "use a smaller whole number")
        hint: object = self.will_return
        if not isinstance(hint, bool | None):
            refuse("will_return", "is neither true nor false", "leave it out if you do not know")
        if any(not text for text in self.stop):
            refuse("stop", "holds an empty string", "leave it out")
        if len(self.stop) > MAX_STOPS:
            refuse("stop", f"holds more than {MAX_STOPS} strings", f"use at most {MAX_STOPS}")
        if self.logit_bias:
            self._check_biases()
        if self.allowed_token_ids is not None or self.bad_words or self.bad_words_token_ids:
            self._check_bounds()

    def _check_biases(self) -> None:
        count = len(self.logit_bias)
        if count > MAX_BIASES:
            remedy = f"use at most {MAX_BIASES}"
            raise ChangeSomething("logit_bias", f"{count} tokens", "are too many", remedy)
        for token, bias in self.logit_bias.items():
            if token < 0 or not isfinite(bias) or abs(bias) > MAX_BIAS:
                problem = f"is not a token id with a bias between -{MAX_BIAS:g} and {MAX_BIAS:g}"
                raise ChangeSomething("logit_bias", f"{token}: {bias}", problem, "correct it")

    def _check_bounds(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_words
        if allowed is not None and not 1 <= len(allowed) <= MAX_ALLOWED_TOKENS:
            problem = f"must be 1 to {MAX_ALLOWED_TOKENS} ids"
            remedy = "leave it out to allow all, or exclude some by logit_bias"
            raise ChangeSomething("allowed_token_ids", f"{len(allowed)} tokens", problem, remedy)
        if allowed is not None and min(allowed) < 0:
            raise ChangeSomething(
                "allowed_token_ids", min(allowed), "is not a token id", "correct it"
            )
        if len(words) > MAX_BAD_WORDS:
            remedy = f"use at most {MAX_BAD_WORDS}"
            raise ChangeSomething("bad_words", f"{len(words)} texts", "are too many", remedy)
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                problem = f"does not have 1 to {MAX_BAD_WORD_CHARS} characters"
                raise ChangeSomething("bad_words", repr(word[:40]), problem, "correct it")
        forms = self.bad_words_token_ids
        if len(forms) > 2 * MAX_BAD_WORDS or any(not form or min(form) < 0 for form in forms):
            value = f"{len(forms)} lists"
            problem = f"are not at most {2 * MAX_BAD_WORDS} lists of token ids"
            raise ChangeSomething("bad_words_token_ids", value, problem, "use bad_words")

    @cached_property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from unchanged logits, and no logprobs are returned."""
        tells = self.logprobs is not None or self.prompt_logprobs is not None
        return not (tells or self.looks_back or self.logit_bias or self.is_bounded)

    @cached_property
    def is_bounded(self) -> bool:
        """Whether some tokens are excluded, besides those that a grammar excludes."""
        return self.allowed_token_ids is not None or bool(self.bad_words_token_ids)

    @cached_property
    def looks_back(self) -> bool:
        """Whether earlier tokens affect the next one otherwise than by the logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0
        reads = self.structured_outputs is not None or self.reasoning_budget is not None
        return reads or bool(self.bad_words_token_ids) or any(penalties) or self.min_tokens > 0

    def choices(self) -> "tuple[SamplingParams, ...]":
        """Return parameters for each of the ``n`` answers, one request each; seeds count up."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else (self.seed + i) % MAX_SEED for i in range(self.n)]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)


_LAST = fields(SamplingParams)[-1].name


class SeedSource:
    """The seeds of requests that have none, in the order in which they begin.

    With a seed, the n-th such request that samples always has the same seed.  Requests with seeds
    of their own, and greedy ones, are not counted.  Requests that arrive together have no order.

    :param seed: seed of the sequence; None draws each seed at random.
    """

    def __init__(self, seed: int | None = None) -> None:
        """:raises ChangeSomething: if the seed is not a whole number in its range."""
        if seed is not None:
            seed = SamplingParams(seed=whole("seed", seed)).seed
        self._seed = seed  # atomic, so that any thread may draw
        self._numbers = count()

    def with_seed(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters of one request, with a seed if it samples and has none."""
        if sampling.seed is not None or sampling.temperature == 0:
            return sampling
        if self._seed is None:
            return sampling.reseeded(secrets.randbelow(MAX_SEED))
        text = f"{self._seed} {next(self._numbers)}"
        digest = hashlib.blake2b(text.encode(), digest_size=SEED_BYTES).digest()
        return sampling.reseeded(int.from_bytes(digest, "little"))


NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
WHOLE_NUMBERS = ("top_k", "n", "min_tokens", "seed", "max_tokens", "repeat_last_n")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(NUMBERS, number),
    **dict.fromkeys(WHOLE_NUMBERS, whole),
    **dict.fromkeys(FLAGS, flag),
    **dict.fromkeys(("stop", "bad_words"), texts),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), token_ids),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _how_many),
    "logit_bias": biases,
    "structured_outputs": _constraint,
    "output_kind": _output_kind,
}
"""The type check of each field that users set."""
PLAIN_TYPES: Mapping[str, type] = {
    **dict.fromkeys(NUMBERS, float),
    **dict.fromkeys(WHOLE_NUMBERS, int),
    **dict.fromkeys(FLAGS, bool),
}
"""Types of values that need no type check."""
DEFAULTS: Mapping[str, Any] = {
    spec.name: spec.default for spec in fields(SamplingParams) if spec.name in READERS
} | {"logit_bias": {}, "max_tokens": None}
"""The values that None stands for, as in vLLM."""
UNSET: Mapping[str, object] = {spec.name: spec.default for spec in fields(SamplingParams)} | {
    "logit_bias": DEFAULTS["logit_bias"]
}
"""The values of all fields that are not given."""
