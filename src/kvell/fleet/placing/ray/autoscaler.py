"""Ray's autoscaler, which starts machines when there is no room, on Kubernetes or in a cloud."""

import re

import msgspec
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental.internal_kv import _internal_kv_get

from kvell.wire.decoding import MalformedError, decode

MACHINE_OF_ITS_OWN = re.compile(r"node_[0-9a-f]{56}")
"""Type that Ray gives to a machine that was started by hand."""
NAMESPACE_OF_SECOND, KEY_OF_SECOND = "__autoscaler", "__autoscaler_v2_enabled"
"""Namespace and key under which Ray says whether the second version of its autoscaler runs."""
ENABLED = b"1"


def has_autoscaler() -> bool | None:
    """Return whether Ray's autoscaler may start machines; None if Ray has not reported it yet."""
    enabled = _internal_kv_get(KEY_OF_SECOND, namespace=NAMESPACE_OF_SECOND)
    return starts_machines(_internal_kv_get(DEBUG_AUTOSCALING_STATUS), enabled)


def starts_machines(status: bytes | None, enabled: bytes | None) -> bool | None:
    """Decide from Ray's own records whether its autoscaler may start machines.

    Every head of Ray reports a status, some ten seconds after its start.  Without an autoscaler
    each machine has a type of its own; with one, machines have the types of its configuration.
    The decision is None before the first report.

    :param status: of the autoscaler, as JSON; None before the first one.
    :param enabled: whether the second version of the autoscaler runs, which reports no status.
    """
    if enabled == ENABLED:
        return True
    try:
        report = decode(_DECODER, status or b"{}").autoscaler_report
    except MalformedError:
        return False
    if report is None:
        return None
    types = {*(report.active_nodes or {}), *(report.pending_launches or {})}
    return any(not MACHINE_OF_ITS_OWN.fullmatch(kind) for kind in types)


class _Report(msgspec.Struct, frozen=True):
    active_nodes: dict[str, msgspec.Raw] | None = None
    pending_launches: dict[str, msgspec.Raw] | None = None


class _Status(msgspec.Struct, frozen=True):
    autoscaler_report: _Report | None = None


_DECODER = msgspec.json.Decoder(_Status)
