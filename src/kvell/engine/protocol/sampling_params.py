"""A request's sampling parameters; validated once, at the edge."""

from dataclasses import dataclass, replace

from kvell.errors import ChangeSomething

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and defaults as far as they are implemented.

    :param temperature: 0 is greedy; otherwise logits are divided by it.
    :param top_k: keep the k most likely tokens; 0 or -1 keeps all.
    :param top_p: keep the smallest set whose probability reaches it, in (0, 1].
    :param seed: with it, output token i is a function of (seed, i) and the logits alone;
        None lets the front draw one.
    :param max_tokens: most output tokens; None: up to the model's limit.
    :param stop: the front ends a request before the first of these strings.
    :param stop_token_ids: the engine ends a request after any of these tokens.
    :param ignore_eos: go on past the model's end-of-sequence token.
    :param n: number of answers; each is a request of its own, and they share the prompt's
        pages.
    :param will_return: a hint that changes no answer: whether a later prompt will begin with
        this one (the conversation continues).  False ends a session; None says nothing.
        Prefixes expected to return are kept longer, where eviction learns which do.
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

    def __post_init__(self) -> None:
        def refuse(field: str, problem: str, remedy: str) -> None:
            raise ChangeSomething(field, getattr(self, field), problem, remedy)

        if not 0.0 <= self.temperature <= 100.0:
            refuse("temperature", "must be between 0 and 100", "use 0 for greedy or 0.7")
        if self.top_k < -1:
            refuse("top_k", "must be -1 or more", "use 0 to keep all tokens")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "must be above 0 and at most 1", "use 1 to keep all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", "must be at least 1", "use 1 or more")
        if not 1 <= self.n <= MAX_CHOICES:
            refuse("n", f"must be between 1 and {MAX_CHOICES}", "use 1 for one answer")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            refuse("seed", f"must be between 0 and {MAX_SEED}", "use a smaller whole number")
        hint: object = self.will_return
        if not isinstance(hint, bool | None):
            refuse("will_return", "is neither true nor false", "leave it out if you do not know")
        if any(not text for text in self.stop):
            refuse("stop", "holds an empty string", "leave it out")
        if len(self.stop) > 16:
            refuse("stop", "holds more than 16 strings", "use at most 16")

    def choices(self) -> "tuple[SamplingParams, ...]":
        """Parameters of each of the ``n`` answers, one request each; seeds count up."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else (self.seed + i) % MAX_SEED for i in range(self.n)]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)
