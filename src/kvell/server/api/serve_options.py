"""Options of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvell.cluster.routing.policies import DEFAULT_ROUTING
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.events.events_config import KvEventsConfig
from kvell.front.front import ONE_MIXED
from kvell.server.access.key_file import MAX_IN_FLIGHT
from kvell.server.api.door.face_options import FaceOptions
from kvell.server.api.door.http_bounds import HttpBounds

MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server: addresses, keys, bounds, instances.

    :param port: 0 takes any free port.
    :param api_key: if given, requests need this key, which has all rights, or a key of
        ``api_key_file``.
    :param api_key_file: keys of tenants (``access/key_file``); reloaded at SIGHUP.
    :param max_in_flight_per_key: default limit of the waiting and running sequences of a key.
    :param guard_metrics: whether ``/metrics`` needs an operator's key, if there are keys.
    :param log_requests: whether each request is logged when it ends.
    :param stats_seconds: interval of the statistics in the log while there is traffic; 0 for none.
    :param otlp_traces_endpoint: collector of the requests' traces; None for no traces.
    :param tool_call_parser: format of the first model's calls (``answers/named``); None: by its
        type and chat template.  The same for ``reasoning_parser``.
    :param seed: seed of the requests that have none; None: their seeds are random.
    :param instances: number of instances to start, by role.
    :param routing: policy that selects a request's instance.
    :param pool: how the instances share their memory.
    :param kv_events: where events of the instances' caches are published; None: nowhere.
    :param cluster: address of a Ray cluster that places the instances; None: they run here.
    :param cluster_name: cluster to join or to start, if several share these machines.
    :param http: bounds of connections.
    :param face: how the server appears to clients, browsers and proxies.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    limits: FrontLimits = field(default_factory=FrontLimits)
    instances: Mapping[str, int] = field(default_factory=lambda: dict(ONE_MIXED))
    routing: str = DEFAULT_ROUTING
    api_key_file: Path | None = None
    max_in_flight_per_key: int = MAX_IN_FLIGHT
    guard_metrics: bool = False
    log_requests: bool = False
    stats_seconds: float = 0.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    otlp_traces_endpoint: str | None = None
    seed: int | None = None
    kv_events: KvEventsConfig | None = None
    pool: PoolSettings = field(default_factory=PoolSettings)
    cluster: str | None = None
    cluster_name: str = "kvell"
    http: HttpBounds = field(default_factory=HttpBounds)
    face: FaceOptions = field(default_factory=FaceOptions)
