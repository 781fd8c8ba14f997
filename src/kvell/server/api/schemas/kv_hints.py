"""``kv_hints`` 0.1: an orchestrator's advice on the KV cache of a request.

vLLM, SGLang and TensorRT-LLM take the same envelope.  Kvell follows the actions that it has an
equivalent of; it logs and ignores the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from kvell.errors import ChangeSomething

MAX_ACTIONS = 64
MAX_DIRECTIVES = 128
MAX_PRIORITY = 100
MAX_DURATION_SECONDS = 30 * 86_400
RETAIN = "kv.retain"
_DIRECTIVE_FIELDS = frozenset({"start", "end", "priority", "duration", "covers_output"})

Name = Annotated[str, Field(min_length=1, max_length=256)]


class KvHintAction(BaseModel):
    """One piece of advice."""

    model_config = ConfigDict(extra="forbid")
    action_id: Name
    """The sender's id of the action."""
    action_type: Name
    """Kind of advice: ``kv.retain`` is followed, others are logged and ignored."""
    action_version: Name
    """Version of the payload: 1, for ``kv.retain``."""
    payload: dict[str, object]
    """With ``kv.retain``: ``directives`` with ``priority`` (0 to 100), ``start`` and ``end``."""

    @property
    def is_followed(self) -> bool:
        major = self.action_version.partition(".")[0]
        return self.action_type == RETAIN and major == "1"


class KvHints(BaseModel):
    """The envelope of ``kv_hints``."""

    model_config = ConfigDict(extra="forbid")
    protocol_version: Literal["0.1"]
    """Version of the envelope."""
    message_id: Name
    """The sender's id of the message."""
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS, fail_fast=True)]
    """Pieces of advice, at most 64; each is independent."""

    def will_return(self) -> bool | None:
        """Return whether a later prompt will begin with this one; None if no action implies it.

        A directive that protects tokens implies that a later prompt has them; one that releases
        the whole prompt implies the opposite.  The last action that implies either counts.

        :raises ChangeSomething: naming an invalid field of an action that is followed.
        """
        result: bool | None = None
        for index, action in enumerate(self.actions):
            if action.is_followed:
                returns = _returns(f"kv_hints.actions[{index}].payload", action.payload)
                result = result if returns is None else returns
        return result

    def find_ignored(self) -> list[str]:
        others = [action for action in self.actions if not action.is_followed]
        return [f"{action.action_type}@{action.action_version}" for action in others]


@dataclass(frozen=True)
class _Directive:
    """A directive of ``kv.retain``.

    :param is_whole: whether its tokens are the whole prompt.
    """

    priority: int
    is_whole: bool


def _returns(field: str, payload: Mapping[str, object]) -> bool | None:
    scope = payload.get("scope")
    given = payload.get("directives")
    if scope is not None and not isinstance(scope, str):
        raise ChangeSomething(f"{field}.scope", "…", "is not text", "leave it out")
    if not isinstance(given, list) or len(given) > MAX_DIRECTIVES:
        remedy = f"send a list of at most {MAX_DIRECTIVES}"
        raise ChangeSomething(f"{field}.directives", "…", "is not a list of directives", remedy)
    read = [_directive(f"{field}.directives[{index}]", item) for index, item in enumerate(given)]
    if any(directive.priority > 0 for directive in read):
        return True
    return False if any(directive.is_whole for directive in read) else None


def _directive(field: str, given: object) -> _Directive:
    """Return a directive after the checks that vLLM makes."""

    def refuse(name: str, problem: str, remedy: str) -> NoReturn:
        raise ChangeSomething(f"{field}{name}", "…", problem, remedy)

    if not isinstance(given, dict):
        refuse("", "is not an object", 'send {"priority": …, "start": …, "end": …}')
    for name in given:
        if name not in _DIRECTIVE_FIELDS:
            names = ", ".join(sorted(_DIRECTIVE_FIELDS))
            refuse(f".{str(name)[:40]}", "is unknown", f"use {names}")
    priority = _count(given.get("priority"))
    start = _count(given.get("start", 0))
    end = None
    if priority is None or priority > MAX_PRIORITY:
        refuse(".priority", f"is not a whole number from 0 to {MAX_PRIORITY}", "use 0 to release")
    if start is None:
        refuse(".start", "is not a position", "use 0 for the beginning")
    if given.get("end") is not None:
        end = _count(given["end"])
        if end is None or end <= start:
            refuse(".end", "is not a position after start", "use null for the end")
    covers = given.get("covers_output", False)
    duration = given.get("duration")
    if not isinstance(covers, bool):
        refuse(".covers_output", "is neither true nor false", "leave it out")
    if covers and given.keys() & {"start", "end"}:
        refuse(".covers_output", "cannot be combined with start or end", "leave these out")
    is_number = isinstance(duration, int | float) and not isinstance(duration, bool)
    if duration is not None and not (is_number and 0 <= duration <= MAX_DURATION_SECONDS):
        problem = f"is not a number of seconds up to {MAX_DURATION_SECONDS}"
        refuse(".duration", problem, "use null for no end")
    return _Directive(priority, is_whole=not covers and start == 0 and end is None)


def _count(value: object) -> int | None:
    """Return a whole number that is 0 or more; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
