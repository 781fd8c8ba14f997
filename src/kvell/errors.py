"""Two families of errors: *change something* and *try later*.

A caller that gets :class:`ChangeSomething` must change a named field; repeating
the same call cannot help.  A caller that gets :class:`TryLater` did nothing
wrong and may try again.
"""


class KvellError(Exception):
    """Base of all errors that Kvell raises on purpose; the text is one clear line."""


class ChangeSomething(KvellError):  # noqa: N818 - the name says what to do
    """Something the user gave cannot work.

    :param field: the flag, parameter or file that is wrong, as the user wrote it.
    :param value: its value.
    :param problem: what is wrong with it, without the field's name.
    :param remedy: what to change, with a value that works where one is known.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{field}={value}: {problem}; {remedy}")


class TryLater(KvellError):  # noqa: N818
    """The request is valid, but there is no room or no peer at the moment."""


class InstanceDied(TryLater):
    """The process that served a request ended before the request."""
