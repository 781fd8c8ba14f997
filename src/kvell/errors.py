"""Two families of errors: *change something* and *try later*.

A caller that gets :class:`ChangeSomething` must change a named field; repeating the same call
cannot help. A caller that gets :class:`TryLater` did nothing wrong and may try again.
"""

from typing import Literal

Bound = Literal[
    "max_waiting",
    "body_bytes",
    "body_shape",
    "text_bytes",
    "image_pixels",
    "logprob_bytes",
    "answer_bytes",
    "grammar",
    "connections",
    "slow_client",
    "sequences",
    "priority",
    "requests_per_minute",
    "tokens_per_minute",
]
"""The bounds on the work of clients; refusals are counted by these names."""


class KvellError(Exception):
    """Base of all errors that Kvell raises on purpose; the text is one clear line.

    :ivar bound: the bound that a request exceeded, for the HTTP face to count; None if the error
        has another reason or was counted where it was raised.
    """

    bound: Bound | None = None


class ChangeSomething(KvellError):  # noqa: N818 - the name says what to do
    """An input of the user that cannot work.

    :param field: the flag, parameter or file that is wrong, as the user wrote it.
    :param value: its value.
    :param problem: what is wrong with it, without the field's name.
    :param remedy: the change to make, with a value that works if one can be named.
    :param bound: the bound that the field exceeds, if that is the problem.
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


class UnknownArgument(ChangeSomething, TypeError):  # noqa: N818
    """An argument that a call does not have."""


class TryLater(KvellError):  # noqa: N818
    """A valid request that finds no room or no peer at the moment.

    :param message: the lack, in one line.
    :param bound: the bound that leaves no room, if there is one.
    """

    def __init__(self, message: str, *, bound: Bound | None = None) -> None:
        self.bound = bound
        super().__init__(message)


class InstanceDied(TryLater):
    """The process that served a request ended before the request."""


class RequestFailed(KvellError):  # noqa: N818 - it is the request that failed
    """A request that failed: the model's logits are not numbers, or its instance failed."""
