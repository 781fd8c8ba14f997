"""Tells the miss log what it asks of requests and of the memory core."""

from collections.abc import Sequence

from kvell.engine.protocol.pages import Miss
from kvell.engine.requests.misses import Admission, MissLog, Reach
from kvell.engine.requests.request import Request
from kvell.memory import VisibleCore, common_prefix, policy_of


class MissWatch:
    """A :class:`MissLog` over one memory core."""

    def __init__(self, core: VisibleCore, log: MissLog | None = None) -> None:
        self._core = core
        self._log = log or MissLog()

    @property
    def latest(self) -> tuple[Miss, ...]:
        """The latest misses, the oldest first."""
        return self._log.latest

    @property
    def counts(self) -> dict[str, int]:
        """Misses since the start, by reason."""
        return self._log.counts

    def admitted(self, request: Request, step: int, running: Sequence[Request]) -> None:
        """Note the first admission of a request whose prefix was looked up.

        :param running: every running request, maybe this one too.
        """
        hit_tokens = request.cached_tokens or 0
        self._log.admitted(
            Admission(
                request.request_id,
                request.prompt,
                request.cache_root,
                request.model,
                step,
                hit_tokens,
            ),
            lambda: any(_computes(other, request, hit_tokens) for other in running),
            lambda: self._reaches(request),
        )

    def ended(self, request: Request, step: int) -> None:
        """Note what of a request is computed at its end."""
        tokens = request.tokens(0, request.settled)
        self._log.ended(tokens, request.cache_root, request.model, step)

    def _reaches(self, request: Request) -> list[Reach]:
        """How far each group that a hit of the request needs could go alone."""
        lengths = self._core.reach(
            request.prompt,
            request.cache_root,
            images=request.images,
            prompt_tokens=len(request.prompt),
            model=request.model,
        ).tolist()
        return [
            Reach(group.name, length)
            for group, length in zip(self._core.layout.groups, lengths, strict=True)
            if length >= 0 and policy_of(group).required_for_hit
        ]


def _computes(other: Request, request: Request, hit_tokens: int) -> bool:
    """Whether another request has still to compute more of this prompt than was found."""
    if other is request or other.model != request.model or other.cache_root != request.cache_root:
        return False
    if other.settled >= len(other.prompt):
        return False
    return common_prefix(request.prompt, other.prompt) > max(hit_tokens, other.settled)
