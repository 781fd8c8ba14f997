"""Numbers of instances by role: the text of ``--instances`` and its bounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvell.errors import ChangeSomething
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching

ROLES = ("mixed", "prefill", "decode")
"""Roles of instances: all work, computing prompts, or continuing requests after their prompts."""
MOST_INSTANCES = 64
ONE_MIXED: Mapping[str, int] = MappingProxyType({"mixed": 1})

_MOST_DIGITS = 20
_REMEDY = "write it like mixed=3"


def parse_instances(text: str, field: str = "--instances") -> dict[str, int]:
    """Return the number of instances of each role in ``mixed=3``; ``3`` alone means the same.

    :param field: name of the option or field, for errors.
    :raises ChangeSomething: for invalid text, an unknown role, or a number out of bounds.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        role, count = _parsed(part, text, field)
        if role in counts:
            raise ChangeSomething(field, text, f"names {role} twice", _REMEDY)
        counts[role] = count
    return checked_counts(counts, field)


def checked_counts(counts: Mapping[str, int], field: str = "instances") -> dict[str, int]:
    """Check numbers of instances by role, and return them.

    :raises ChangeSomething: if there are none, for an unknown role, or a number out of bounds.
    """
    text = ",".join(f"{role}={count}" for role, count in counts.items())
    if not counts:
        raise ChangeSomething(field, text, "names no role", _REMEDY)
    for role, count in counts.items():
        _check_role(role, text, field)
        if not 1 <= count <= MOST_INSTANCES:
            problem = f"must be between 1 and {MOST_INSTANCES} instances"
            remedy = f"write it like {role}={min(max(count, 1), MOST_INSTANCES)}"
            raise ChangeSomething(field, text, problem, remedy)
    return dict(counts)


def check_start(counts: Mapping[str, int], field: str = "--instances") -> None:
    """Check that instances of these roles can serve requests together.

    :raises ChangeSomething: for prefill instances without decode instances, or the reverse.
    """
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in counts and other not in counts:
            text = ",".join(f"{name}={count}" for name, count in counts.items())
            remedy = f"write it like {role}={counts[role]},{other}=1"
            raise ChangeSomething(field, text, f"has {role} instances without {other} ones", remedy)


def chosen_pd_caching(counts: Mapping[str, int], value: PdCaching | None, field: str) -> PdCaching:
    """Return the caching of prefill and decode instances: ``value``, or else the default.

    :raises ChangeSomething: for a value if there are no prefill instances.
    """
    if value is None:
        return DEFAULT_PD_CACHING
    if "prefill" not in counts:
        problem = "applies to prefill and decode instances, and there are none"
        remedy = "leave it out, or use --instances prefill=1,decode=1"
        raise ChangeSomething(field, value, problem, remedy)
    return value


def _parsed(part: str, text: str, field: str) -> tuple[str, int]:
    role, _, count = part.rpartition("=") if "=" in part else (ROLES[0], "", part)
    role, count = role.strip(), count.strip()
    _check_role(role, text, field)
    if not (count.isascii() and count.isdecimal()):
        raise ChangeSomething(field, text, "is not a whole number of instances", _REMEDY)
    # A number of many digits is out of bounds anyway, and int() refuses the longest ones.
    return role, int(count[:_MOST_DIGITS])


def _check_role(role: str, text: str, field: str) -> None:
    if role not in ROLES:
        raise ChangeSomething(field, text, f"{role!r} is not a role of an instance", _REMEDY)


def check_adaptive_roles(counts: Mapping[str, int], name: str) -> None:
    """Check that an instance can change its role while another keeps that role.

    :param name: name of the option, for errors.
    :raises ChangeSomething: if no instance can.
    """
    split = [counts.get(role, 0) for role in ("prefill", "decode")]
    if min(split) < 1 or sum(split) < 3:
        raise ChangeSomething(
            name,
            True,
            "needs instances of both roles, and two of one of them",
            "start prefill=1,decode=2 or more, or leave it out",
        )


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one instance.

    :param processors: numbers of the processors that it may run on.
    :param threads: number of threads that compute its steps.
    """

    processors: tuple[int, ...]
    threads: int


def processor_shares(processors: Sequence[int], instances: int) -> list[Share]:
    """Return a share for each instance.

    With at least as many processors as instances, each gets consecutive ones of its own, as evenly
    as possible, and a thread for each of them: threads of different instances never wait for each
    other in the middle of a step.  Consecutive numbers keep a share within one cache or socket on
    most machines.

    With fewer processors each instance has one thread, and may run on all of them.  Pinned, three
    instances on two processors would leave one instance with twice the speed of the others, and
    its processor idle when that instance is; the system's scheduler shares evenly.

    :raises ValueError: if there are no processors or no instances.
    """
    ordered = tuple(sorted(set(processors)))
    if not ordered or instances < 1:
        raise ValueError(f"nothing to share: {len(ordered)} processors, {instances} instances")
    if instances > len(ordered):
        return [Share(ordered, 1)] * instances
    each, extra = divmod(len(ordered), instances)
    shares, start = [], 0
    for index in range(instances):
        end = start + each + (index < extra)
        shares.append(Share(ordered[start:end], end - start))
        start = end
    return shares
