"""The errors of a call, which name its round, step and clients."""

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from actors.errors import ClusterError, LostObjects, unwrapped
from rayfl.rounds.errors import ClientError
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.worker_jobs import RoundInputs


def readable(error: RayTaskError, shared: Ref, job: Job) -> BaseException:
    """The error that an actor raised, with its round: ClientError, or ClusterError if an input was lost."""
    cause = unwrapped(error)
    if isinstance(cause, ClientError):
        return cause
    kind_of_error = ClientError
    if isinstance(cause, RayError):
        kind_of_error = LostObjects if isinstance(cause, ObjectLostError) else ClusterError
    wrapped = kind_of_error(f"{describe_call(shared, job)}: {type(cause).__name__}: {cause}")
    wrapped.add_note(str(error))
    return wrapped


def describe_call(shared: Ref, job: Job) -> str:
    """The round, step and clients of a job, for a sentence."""
    about: RoundInputs = ray.get(shared)
    clients = getattr(job.work, "clients", None) or tuple(getattr(job.work, "rows", ()))
    of = f", clients {clients[0]} to {clients[-1]}" if clients else ""
    return f"round {about.round}, {job.work.kind}{of}"
