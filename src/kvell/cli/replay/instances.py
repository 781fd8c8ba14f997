"""``kvell replay --instances``: several instances behind a front, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvell.cluster.instances import check_start, chosen_pd_caching, parse_instances
from kvell.errors import ChangeSomething
from kvell.flags import setting, setting_of
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.server.api.serve_options import ServeOptions

if TYPE_CHECKING:
    from kvell.cost.model import CostModel
    from kvell.cost.prices import ExecCosts
    from kvell.memory import LayerSpec
    from kvell.simulator.clock.links import Link
    from kvell.simulator.cluster.cluster import ClusterSpec
    from kvell.simulator.replay.runner import StepTimer
    from kvell.simulator.traces.rows import TraceRow

LINKS = {
    "a100": "nvlink-a100",
    "h100": "nvlink-h100",
    "h200": "nvlink-h100",
    "h800": "nvlink-h800",
    "l4": "pcie-4",
    "l40s": "pcie-4",
}
"""The usual link between devices of a machine, by the first part of a profile's name."""


@dataclass(frozen=True)
class Together:
    """The flags of several instances."""

    instances: str | None = setting(
        None,
        "--instances",
        "Several instances behind a front, like prefill=1,decode=2 or mixed=3.",
        metavar="ROLE=N,…",
    )
    routing: str = setting_of(ServeOptions, "routing")
    pd_caching: PdCaching | None = setting_of(PoolSettings, "pd_caching")
    link: str | None = setting(
        None,
        "--link",
        "Between two instances: a name like nvlink-h100, or a TOML file."
        "  [default: as usual for the hardware]",
        metavar="LINK",
    )
    link_bandwidth: int | None = setting(
        None,
        "--link-bandwidth",
        "Bytes per second in one direction, like 25GB, in place of the link's.",
        "bytes",
    )

    def counts(self) -> dict[str, int] | None:
        """Return the number of instances of each role; None without the flag.

        :raises ChangeSomething: if these roles cannot serve requests together, or other flags are
            given without ``--instances``.
        """
        if self.instances is None:
            alone = {"--pd-caching": self.pd_caching, "--link": self.link}
            for flag, value in (alone | {"--link-bandwidth": self.link_bandwidth}).items():
                if value is not None:
                    problem = "is about several instances"
                    remedy = "add --instances prefill=1,decode=1"
                    raise ChangeSomething(flag, value, problem, remedy)
            return None
        counts = parse_instances(self.instances)
        check_start(counts)
        chosen_pd_caching(counts, self.pd_caching, "--pd-caching")
        return counts

    @property
    def caching(self) -> PdCaching:
        """The caching policy of prefill and decode instances."""
        return DEFAULT_PD_CACHING if self.pd_caching is None else self.pd_caching

    def pages_link(self, hardware: str, machine: "StepTimer") -> "Link":
        """Return the link that carries pages between two instances.

        :raises ChangeSomething: if there is no such link, or the hardware has no usual link.
        """
        from kvell.simulator.clock.links import Link
        from kvell.simulator.hardware.profiles import load_link
        from kvell.simulator.replay.runner import CalibratedMachine

        usual = LINKS.get(Path(hardware).stem.partition("-")[0])
        name = self.link or usual
        if self.link is None and isinstance(machine, CalibratedMachine):
            rate = machine.calibration.copy_bytes_per_second
            return Link(bandwidth_bytes=float(self.link_bandwidth or rate))
        if name is None and self.link_bandwidth is None:
            problem = "does not say how its devices are connected"
            remedy = "use --link nvlink-h100, or --link-bandwidth 25GB"
            raise ChangeSomething("--hardware", hardware, problem, remedy)
        if name is None:
            return Link(bandwidth_bytes=float(self.link_bandwidth or 0))
        profile = load_link(name)
        rate = self.link_bandwidth or profile.bytes_per_second
        return Link(profile.latency_seconds, float(rate))

    def hosts(self, machine: "StepTimer") -> dict[str, str] | None:
        """Return the hosts of :class:`.ClusterSpec`: one host for CPU pools, else None.

        Only instances with CPU pools lend each other memory.
        """
        from kvell.simulator.replay.runner import CalibratedMachine

        if not isinstance(machine, CalibratedMachine):
            return None
        return {} if machine.calibration.machine.device == "cpu" else None


def check_rows(rows: Sequence["TraceRow"], arrivals: str) -> None:
    """Check that several instances can replay the rows.

    :raises ChangeSomething: with the flag to change.
    """
    if arrivals != "trace":
        problem = "does not say when requests arrive at the front"
        raise ChangeSomething("--arrivals", arrivals, problem, "use --arrivals trace, or --rate R")
    if any(row.images for row in rows):
        problem = "has images, which several instances do not replay"
        raise ChangeSomething("--trace", "rows", problem, "leave --instances out")


def replay_together(
    spec: "ClusterSpec",
    rows: Sequence["TraceRow"],
    layers: Sequence["LayerSpec"],
    *,
    sessions: bool,
    progress: Callable[[float], None],
) -> tuple[dict[str, Any], list[Any]]:
    """Return the figures of a run, and the figures of each request.

    :param layers: of the model, whose prices on this hardware the instances report.
    """
    from kvell.simulator.cluster.cluster import VirtualCluster
    from kvell.simulator.cluster.figures import cluster_figures

    spec = replace(spec, costs=hardware_prices(spec, layers))
    cluster = VirtualCluster(spec, rows, sessions=sessions)
    cluster.run(progress)
    return cluster_figures(cluster), cluster.front.requests


def hardware_prices(spec: "ClusterSpec", layers: Sequence["LayerSpec"]) -> "ExecCosts":
    """Return the prices of a model on the hardware of a cluster; other timers keep its prices."""
    from kvell.cost.amounts import shape_of
    from kvell.cost.analytic import AnalyticModel
    from kvell.cost.prices import prices_of
    from kvell.simulator.replay.runner import CalibratedMachine, Machine

    machine, rate = spec.machine, spec.links.pages.bandwidth_bytes
    if isinstance(machine, CalibratedMachine):
        model: CostModel = machine.calibration
    elif isinstance(machine, Machine):
        model = AnalyticModel(machine.profile, machine.cost)
    else:
        return spec.costs
    return prices_of(
        model,
        shape_of(layers),
        fetch_bytes_per_second=rate,
        swap_bytes_per_second=rate,
        chunk_tokens=spec.limits.max_num_batched_tokens,
    )
