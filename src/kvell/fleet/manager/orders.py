"""What fronts order for all instances: carried out, and answered."""

from kvell.cluster.instances import checked_counts
from kvell.errors import ChangeSomething, KvellError
from kvell.fleet.manager.messages import Answer, DrainInstance, ScaleInstances
from kvell.fleet.started.members import Members

Order = ScaleInstances | DrainInstance


def carried_out(members: Members, order: Order) -> Answer:
    """Carry an order out; the answer says what must be changed if it cannot be."""
    try:
        if isinstance(order, ScaleInstances):
            members.scale_now(checked_counts(order.instances))
        else:
            members.drain_now(order.instance_id)
    except ChangeSomething as error:
        return Answer(order.call, error.field, str(error.value), error.problem, error.remedy)
    except KvellError as error:
        return refused(order, str(error))
    return Answer(order.call)


def refused(order: Order, problem: str) -> Answer:
    """The answer to an order that nobody can carry out just now."""
    return Answer(order.call, "instances", "", problem, "try again in a moment")
