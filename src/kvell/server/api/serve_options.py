"""Options of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvell.cluster.instances import ONE_MIXED, parse_instances
from kvell.cluster.routing.policies import DEFAULT_ROUTING, ROUTINGS
from kvell.engine.protocol.sampling_params import MAX_SEED
from kvell.flags import Flag, setting
from kvell.fleet.instance.price_settings import PriceSettings
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.events.events_config import KvEventsConfig, parse_events_config
from kvell.server.access.key_file import MAX_IN_FLIGHT
from kvell.server.api.door.face_options import FaceOptions
from kvell.server.api.door.http_bounds import HttpBounds

MAX_BODY_BYTES = 32 << 20
_INSTANCES = Flag(
    "--instances",
    "text",
    "Engines behind this server, each with its own KV pool.",
    "ROLE=N",
    typed="mixed=1",
    parse=parse_instances,
)


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server: addresses, keys, bounds, instances.

    :param api_key: gives all rights, as a key of an operator in ``api_key_file`` does.
    :param tool_call_parser: a name of ``answers/named``; the same for ``reasoning_parser``.
    :param instances: number of instances to start, by role.
    :param kv_events: where events of the instances' caches are published; None: nowhere.
    """

    host: str = setting("127.0.0.1", "--host", "Address to listen on.")
    port: int = setting(
        8000,
        "--port",
        "Port to listen on; 0 takes a free one.",
        "integer",
        metavar="",
        least=0,
        most=65535,
    )
    api_key: str | None = setting(
        None, "--api-key", "Clients must send it; without a key, all are served."
    )
    max_body_bytes: int = MAX_BODY_BYTES
    limits: FrontLimits = field(default_factory=FrontLimits)
    instances: Mapping[str, int] = field(
        default_factory=lambda: dict(ONE_MIXED), metadata={"flag": _INSTANCES}
    )
    routing: str = setting(
        DEFAULT_ROUTING,
        "--routing",
        f"Instance that gets a request: {', '.join(ROUTINGS)}.",
        metavar="POLICY",
        choices=ROUTINGS,
    )
    api_key_file: Path | None = setting(
        None,
        "--api-key-file",
        "Keys of several tenants, with limits; read again at SIGHUP.",
        "path",
        metavar="FILE",
    )
    max_in_flight_per_key: int = setting(
        MAX_IN_FLIGHT,
        "--max-in-flight-per-key",
        "Maximum number of waiting and running answers of each key in --api-key-file.",
        "integer",
        metavar="SEQUENCES",
    )
    guard_metrics: bool = setting(
        False, "--guard-metrics", "Require an operator's key for /metrics, too.", "mark"
    )
    log_requests: bool = setting(
        False,
        "--log-requests",
        "Log each request when it ends; probes, scrapes and other reads of the server's state only "
        "if they fail.",
        "mark",
    )
    stats_seconds: float = setting(
        10.0,
        "--stats-seconds",
        "Time between lines of statistics while there is traffic; 0 for none.",
        "seconds",
        least=0,
    )
    tool_call_parser: str | None = setting(
        None,
        "--tool-call-parser",
        "How the first model writes tool calls; by default as its template says.",
        metavar="NAME",
    )
    reasoning_parser: str | None = setting(
        None,
        "--reasoning-parser",
        "How the first model writes its reasoning; by default as its template says.",
        metavar="NAME",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "--otlp-traces-endpoint",
        "Send a trace of each request to this collector, by OTLP over HTTP.",
        metavar="URL",
    )
    seed: int | None = setting(
        None,
        "--seed",
        "Seed of the requests that have none: the same requests in the same order"
        " sample with the same seeds. [default: random]",
        "integer",
        least=0,
        most=MAX_SEED,
    )
    kv_events: KvEventsConfig | None = setting(
        None,
        "--kv-events-config",
        "Publish cached blocks for external routers, in vLLM's schema over ZeroMQ.",
        metavar="JSON",
        parse=parse_events_config,
    )
    pool: PoolSettings = field(default_factory=PoolSettings)
    prices: PriceSettings = field(default_factory=PriceSettings)
    cluster: str | None = setting(
        None,
        "--cluster",
        "Place the instances on the machines of a Ray cluster: ray://HOST:PORT, HOST:PORT,"
        " auto, or local-ray, which starts one here. [default: on this machine]",
        metavar="ADDRESS",
    )
    cluster_name: str = setting(
        "kvell",
        "--cluster-name",
        "Servers of one name share their instances; the first starts them.",
        metavar="NAME",
    )
    http: HttpBounds = field(default_factory=HttpBounds)
    face: FaceOptions = field(default_factory=FaceOptions)
