"""Placement groups and launchers of a cluster in Ray, and the record of its instances."""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Mapping

import msgspec
import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvell.fleet.placing.placement import NoRoomError, PlacingError
from kvell.fleet.placing.ray.connection import LOOK_SECONDS, call
from kvell.fleet.placing.ray.launcher_actor import LauncherHandle, launcher_kind
from kvell.fleet.placing.ray.machines import machines
from kvell.fleet.placing.ray.names import NAMESPACE, LauncherName, drawn_group, group_beginning
from kvell.fleet.placing.ray.record import (
    Bundle,
    Group,
    Remains,
    decode_record,
    sorted_out,
)
from kvell.fleet.placing.ray.room import PROCESSOR, no_room, reserved_by_instance, sharing, shortage
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


ROOM_SECONDS = 5.0
"""Missing room is an error after this time: instances that have just ended give theirs back
sooner."""
REPORT_SECONDS = 30.0
"""The same before Ray has reported whether it has an autoscaler: it soon does."""
PLACED_STATES = {"CREATED", "RESCHEDULING"}
GONE_STATE = "REMOVED"


class Reservations:
    """Reservations of one cluster.  Methods that are not async block, and are called in threads.

    :param on_wait: is called with what a reservation waits for; "" when it waits no longer.
    """

    def __init__(self, cluster: str, on_wait: Callable[[str], None]) -> None:
        self._cluster, self._on_wait = cluster, on_wait
        self._key = f"reservations/{cluster}"

    def read_remains(self) -> Remains:
        record = decode_record(_internal_kv_get(self._key, namespace=NAMESPACE))
        return sorted_out(record, self._groups(), self._launchers())

    def save_record(self, record: Mapping[str, Bundle]) -> None:
        _internal_kv_put(self._key, msgspec.msgpack.encode(record), namespace=NAMESPACE)

    def delete_record(self) -> None:
        _internal_kv_del(self._key, namespace=NAMESPACE)

    def drawn_name(self) -> str:
        return drawn_group(self._cluster)

    def make(self, name: str, bundles: int) -> None:
        reserved = [reserved_by_instance(machines()) for _ in range(bundles)]
        placement_group(reserved, "SPREAD", name, "detached")

    def remove_group(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(name))

    def remove_all(self) -> None:
        for launcher in self._launchers():
            self.kill_launcher(launcher)
        for group in self._groups():
            self.remove_group(group.name)
        self.delete_record()

    async def wait_for_room(
        self, name: str, instance_ids: list[str], within_seconds: float
    ) -> None:
        """Wait until Ray has placed a group.

        :raises NoRoomError: when no machine has room, and Ray starts none.
        :raises PlacingError: when Ray does not place the group in time.
        """
        group = await call(functools.partial(get_placement_group, name))
        deadline = time.monotonic() + within_seconds
        short_since: float | None = None
        try:
            while not await call(functools.partial(group.wait, LOOK_SECONDS)):
                now = time.monotonic()
                if now >= deadline:
                    raise PlacingError(f"Ray placed no instance within {within_seconds:g} s")
                nodes = await call(machines)
                missing = shortage(nodes, len(instance_ids))
                if not missing:
                    short_since = None
                elif is_scaled := await call(has_autoscaler):
                    self._on_wait(f"machines of Ray's autoscaler ({missing})")
                elif short_since is None:
                    short_since = now
                elif now - short_since >= (REPORT_SECONDS if is_scaled is None else ROOM_SECONDS):
                    raise NoRoomError(str(no_room(nodes, instance_ids)))
        finally:
            self._on_wait("")

    def launch(
        self, instance_id: str, bundle: Bundle, secret: bytes, instances: int
    ) -> LauncherHandle:
        """Make the actor that launches an instance in its bundle.

        :param instances: all of the cluster; they share the machines.
        """
        group = get_placement_group(bundle.group)
        nodes = machines()
        needs = reserved_by_instance(nodes)
        kind = launcher_kind().options(
            name=str(self._launcher(instance_id, bundle)),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            get_if_exists=True,  # a start that was cancelled may have made it
            num_cpus=needs.pop(PROCESSOR, 0.0),
            resources=needs,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle.index),
        )
        return kind.remote(secret, sharing(nodes, instances))

    def find_launcher(self, instance_id: str, bundle: Bundle) -> LauncherHandle | None:
        """Return the actor that an earlier manager has made for an instance; None without one."""
        with contextlib.suppress(ValueError):
            return ray.get_actor(str(self._launcher(instance_id, bundle)), NAMESPACE)
        return None

    def end_launcher(self, instance_id: str, bundle: Bundle) -> None:
        self.kill_launcher(self._launcher(instance_id, bundle))

    def kill_launcher(self, launcher: LauncherName) -> None:
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(str(launcher), NAMESPACE), no_restart=True)

    def _launcher(self, instance_id: str, bundle: Bundle) -> LauncherName:
        return LauncherName(self._cluster, instance_id, bundle.group, bundle.index)

    def _groups(self) -> list[Group]:
        beginning = group_beginning(self._cluster)
        return [
            Group(str(group["name"]), len(group["bundles"]), group["state"] in PLACED_STATES)
            for group in placement_group_table().values()
            if group["name"].startswith(beginning) and group["state"] != GONE_STATE
        ]

    def _launchers(self) -> list[LauncherName]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [
            LauncherName.of(str(actor["name"]))
            for actor in actors
            if actor["namespace"] == NAMESPACE
        ]
        return [name for name in names if name is not None and name.cluster == self._cluster]
