"""Orders of fronts for all instances: execution and answers."""

from kvell.cluster.instances import checked_counts
from kvell.errors import ChangeSomething, KvellError
from kvell.fleet.manager.messages import Answer, DrainInstance, ScaleInstances
from kvell.fleet.started.members import Members

Order = ScaleInstances | DrainInstance


def carried_out(members: Members, order: Order) -> Answer:
    """Carry an order out, and return the answer, which may name what must be changed."""
    try:
        if isinstance(order, ScaleInstances):
            members.scale_now(checked_counts(order.instances))
        else:
            members.drain_now(order.instance_id)
    except ChangeSomething as error:
        return Answer(order.call, error.field, str(error.value), error.problem, error.remedy)
    except KvellError as error:
        return refuse(order, str(error))
    return Answer(order.call)


def refuse(order: Order, problem: str) -> Answer:
    return Answer(order.call, "instances", "", problem, "retry in a moment")
