"""``/cluster``: the instances and their number, for operators."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.instances import checked_counts
from kvell.cluster.steering.placements import Placement
from kvell.fleet.fleet import MemberStatus
from kvell.front.front import Front
from kvell.server.map.history import loans_of
from kvell.server.metrics.instance_metrics import contract_of_all


class ScaleRequest(BaseModel):
    """The number of instances of each role; roles that are not named stay as they are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    instances: dict[str, int] = Field(min_length=1, max_length=8)
    """Number of instances by role, like ``{"mixed": 3}``."""


class DrainRequest(BaseModel):
    """The instance to take out of service."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(max_length=100)]
    """Id of an instance, like ``mixed-0``."""


class ClusterApi:
    """The handlers of ``/cluster``; all answer with the state after their change has begun."""

    def __init__(self, front: Front, front_floor_bytes: int, front_pid: int) -> None:
        self._front = front
        self._floor_bytes, self._pid = front_floor_bytes, front_pid

    async def status(self) -> Response:
        """List the instances with their states, their work and their memory."""
        return self._answer(200)

    async def scale(self, body: ScaleRequest) -> Response:
        """Set the number of instances per role; instances start or drain after the answer."""
        await self._front.scale(checked_counts(body.instances))
        return self._answer(202)

    async def drain(self, body: DrainRequest) -> Response:
        """Take an instance out of service; it finishes its requests after the answer."""
        await self._front.drain(body.id)
        return self._answer(202)

    def contract_bytes(self) -> int:
        """Return the most memory of all processes, by their contracts."""
        instances = self._front.instances()
        promised = [status.report.facts.memory for status, _ in instances if status.report]
        is_one_host = not any(status.host for status, _ in instances)
        return contract_of_all(promised, shares_weights=is_one_host) + self._floor_bytes

    def install(self, app: FastAPI) -> None:
        app.add_api_route("/cluster", self.status, methods=["GET"])
        app.add_api_route("/cluster/scale", self.scale, methods=["POST"], status_code=202)
        app.add_api_route("/cluster/drain", self.drain, methods=["POST"], status_code=202)

    def _answer(self, status_code: int) -> Response:
        front = self._front
        instances = front.instances()
        sections = sections_of({status.instance_id: line.placements for status, line in instances})
        body = {
            "routing": front.routing,
            "front": {"pid": self._pid, "waiting": front.waiting},
            "instances": [
                {**_instance(status, line), "sections": sections[status.instance_id]}
                for status, line in instances
            ],
            "contract_bytes": self.contract_bytes(),
        }
        content = msgspec.json.encode(body)
        return Response(content, status_code, media_type="application/json")


def sections_of(placements: Mapping[str, Placement]) -> dict[str, dict[str, int]]:
    """Return the number of sections that every instance has ``lent`` and ``borrowed``.

    :param placements: reported places of the KV cache of requests that borrow, by instance.
    """
    loans = loans_of(placements, {})
    return {name: {"lent": each.lent, "borrowed": each.borrowed} for name, each in loans.items()}


PAGES = ("large_pages", "empty_large_pages", "free_bytes")
"""Fields of an instance's load; 0 before its first report."""


def _instance(status: MemberStatus, line: InstanceLoad) -> dict[str, Any]:
    report = status.report
    load = None if report is None else report.load
    return {
        "id": status.instance_id,
        "pid": status.pid,
        "host": status.host,
        "role": status.role,
        "serves_as": line.role,
        "state": status.state,
        "incarnation": line.incarnation,
        "restarts": status.restarts,
        "in_flight": len(line.in_flight),
        "outstanding_prompt_tokens": line.own_prompt_tokens,
        "outstanding_output_tokens": line.outstanding_output_tokens,
        "pages": {name: getattr(load, name, 0) for name in PAGES},
        "contract_bytes": report.facts.memory.get("contract_bytes", 0) if report else 0,
        "prices": report
        and {"origin": report.facts.prices_origin, **msgspec.structs.asdict(report.facts.prices)},
    }
