"""ClientActor: the Ray actor in which clients run. Between calls it keeps the setup, but no client's state."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import ray
import torch

from actors.object_store import in_objects, value
from rayfl.determinism.platform import describe
from rayfl.determinism.process import hide_gpus, prepare_process
from rayfl.determinism.torch_flags import fix
from rayfl.errors import RayflError, refusing_exits
from rayfl.limits.memory import tensor_fraction
from rayfl.own_packages import OwnPackages
from rayfl.rounds.resources import Meter, Use
from rayfl.rounds.worker import Worker
from rayfl.settings import read_here
from rayfl.untyped import Anything

Actor = Anything
"""The handle of an actor, whose methods Ray makes when the program runs."""


@dataclass(frozen=True)
class Joined:
    """An actor that is ready: its process, its node's id and address, and the result of `platform.describe` there."""

    pid: int
    node: str
    address: str
    platform: Mapping[str, object]


@ray.remote
class ClientActor(OwnPackages):
    """Does jobs on clients, one at a time. `join` must be called first."""

    worker: Worker
    meter: Meter

    def __init__(self, gpu_share: float = 0.0) -> None:
        prepare_process()
        self.gpu_share = gpu_share
        if not gpu_share:
            hide_gpus()

    def join(self, setup: Sequence[ray.ObjectRef]) -> Joined:
        """Read the setup and prepare torch.

        Raise RayflError if a GPU is needed and there is none. `setup` is a reference in a list, which Ray does not
        resolve: so an error while the setup is read is one of this method.
        """
        self.worker = Worker(ray.get(setup[0]))
        device = self.worker.setup.device
        if device.type == "cuda":
            if not torch.cuda.is_available():
                node = ray.util.get_node_ip_address()
                raise RayflError(f"device='cuda', but torch sees no GPU on {node}; set runtime.device='cpu'")
            # Ray only counts the shares of a GPU; it does not limit memory.
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(tensor_fraction(self.gpu_share, total))
        fix(self.worker.setup.threads, device, self.worker.setup.precision)
        self.meter = Meter(device, self.gpu_share)
        return Joined(
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            describe(self.worker.setup.threads, device.type),
        )

    def ping(self) -> None:
        """Answer, as a sign of life."""

    def settings_read(self) -> frozenset[tuple[str, str]]:
        """What code has read in this process (`rayfl.settings.read_here`)."""
        return read_here()

    def used(self) -> Use:
        """What this process has used since it was ready."""
        return self.meter.read()

    def call(
        self,
        together: Sequence[Sequence[int]],
        shared: Anything,
        work: Anything,
        places: Sequence[tuple[int, int]],
        *objects: Anything,
    ) -> Anything:
        """Do one job and return its result; a job with outputs returns a generator of the outputs, then the result.

        `together`: the outputs in each object; `places`: the object of each input, and its index there. Ray stores each
        object of a generator before it asks for the next one. Outputs made before an error are stored, too, so only the
        result shows that the call succeeded.
        """
        with refusing_exits():
            result, outputs = self.worker.do(work, shared, [value(objects[at], index) for at, index in places])
        # Ray takes a generator here, and no other iterator.
        return (item for item in chain(in_objects(outputs, together), [result])) if together else result
