"""Two families of errors: *change something* and *try later*.

A caller that gets :class:`ChangeSomething` must change a named field; repeating
the same call cannot help.  A caller that gets :class:`TryLater` did nothing
wrong and may try again.
"""

from typing import Literal

Bound = Literal[
    "max_waiting",
    "body_bytes",
    "body_shape",
    "text_bytes",
    "image_pixels",
    "logprob_bytes",
    "grammar",
    "connections",
    "slow_client",
    "sequences",
    "priority",
    "requests_per_minute",
    "tokens_per_minute",
]
"""Bounds on the work that clients may give; refusals are counted by these names."""


class KvellError(Exception):
    """Base of all errors that Kvell raises on purpose; the text is one clear line.

    :ivar bound: that a request exceeded, for the HTTP face to count; None if the error has another
        reason, or was counted where it was raised.
    """

    bound: Bound | None = None


class ChangeSomething(KvellError):  # noqa: N818 - the name says what to do
    """Something the user gave cannot work.

    :param field: the flag, parameter or file that is wrong, as the user wrote it.
    :param value: its value.
    :param problem: what is wrong with it, without the field's name.
    :param remedy: what to change, with a value that works where one is known.
    :param bound: that it exceeds, if that is the problem.
    """

    def __init__(
        self, field: str, value: object, problem: str, remedy: str, *, bound: Bound | None = None
    ) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        self.bound = bound
        super().__init__(f"{field}={value}: {problem}; {remedy}")


class TryLater(KvellError):  # noqa: N818
    """The request is valid, but there is no room or no peer at the moment.

    :param message: what is missing, in one line.
    :param bound: that leaves no room, if one does.
    """

    def __init__(self, message: str, *, bound: Bound | None = None) -> None:
        self.bound = bound
        super().__init__(message)


class InstanceDied(TryLater):
    """The process that served a request ended before the request."""


class RequestFailed(KvellError):  # noqa: N818 - it is the request that failed
    """A request ended with an error: the model's logits are no numbers, or who served it failed."""
