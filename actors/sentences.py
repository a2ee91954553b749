"""What a failed call is called: its round, its step and its clients, and what to do about it."""

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from actors.errors import ClusterError, LostObjects, unwrapped
from rayfl.rounds.calls import SMALLER, ClientError, RoundInputs
from rayfl.rounds.executor import Job, Ref

ADVICE = (
    "go on with fewer actors (rayfl resume DIR --actors N) or a larger share of a GPU for each (runtime.num_gpus), or "
    f"{SMALLER}"
)
"""What to do about memory."""


def readable(error: RayTaskError, kind: str, shared: Ref, job: Job) -> BaseException:
    """An error raised in an actor, with its round: ClientError, or ClusterError if an input of the call was lost."""
    cause = unwrapped(error)
    if isinstance(cause, ClientError):
        return cause
    kind_of_error = ClientError
    if isinstance(cause, RayError):
        kind_of_error = LostObjects if isinstance(cause, ObjectLostError) else ClusterError
    wrapped = kind_of_error(f"{describe_call(kind, shared, job)}: {type(cause).__name__}: {cause}")
    wrapped.add_note(str(error))
    return wrapped


def describe_call(kind: str, shared: Ref, job: Job) -> str:
    """Round, step and clients of a job, for an error."""
    about: RoundInputs = ray.get(shared)
    clients = getattr(job.work, "clients", None) or tuple(getattr(job.work, "rows", ()))
    of = f", clients {clients[0]} to {clients[-1]}" if clients else ""
    return f"round {about.round}, {kind}{of}"
