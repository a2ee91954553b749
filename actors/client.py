"""ClientActor: the Ray actor in which clients run. It holds the setup and nothing of any client between calls."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from rayfl.determinism.process import prepare_process

if TYPE_CHECKING:
    from rayfl.rounds.worker import Worker

# Any: Ray makes a handle's methods when the program runs.
Actor = Any


@ray.remote
class ClientActor:
    """Does jobs on clients, one at a time. It becomes ready through `join`.

    What brings torch in is imported in the methods, because `prepare_process` must come first.
    """

    worker: "Worker"

    def __init__(self) -> None:
        prepare_process()

    def join(self, setup: Sequence[ray.ObjectRef], gpu_share: float) -> tuple[int, Mapping[str, object]]:
        """Read the setup and prepare torch; returns the process id and `rayfl.determinism.platform.describe`.

        SettingsError if there is no GPU to work on.

        `setup` is a reference in a list, which Ray leaves unresolved, so that torch is not loaded too early.
        """
        import torch

        from rayfl.determinism.platform import describe
        from rayfl.determinism.torch_flags import fix
        from rayfl.rounds.worker import Worker
        from rayfl.settings import SettingsError

        self.worker = Worker(ray.get(setup[0]))
        device = self.worker.setup.device
        if device.type == "cuda":
            if not torch.cuda.is_available():
                node = ray.util.get_node_ip_address()
                raise SettingsError(f"device='cuda', but torch sees no GPU on {node}; set runtime.device='cpu'")
            # Ray shares a GPU out by counting and limits no one's memory.
            torch.cuda.set_per_process_memory_fraction(min(gpu_share, 1.0))
        fix(self.worker.setup.threads, device)
        return os.getpid(), describe(self.worker.setup.threads)

    def ping(self) -> None:
        """Answer, to say that it lives."""

    # Any: a job and what it reads and leaves behind; rayfl.rounds.worker says which kind has which.
    def call(self, kind: str, num_outputs: int, shared: Any, work: Any, *inputs: Any) -> Any:
        """Do one job. Returns its result; where it has outputs, a generator of these and then of the result.

        From a generator Ray stores one object before it asks for the next one. Those that come before an error are
        there all the same: only the last one tells whether all went well.
        """
        result, outputs = self.worker.do(kind, shared, work, inputs)
        return followed(outputs, result) if num_outputs else result


def followed(outputs: Iterable[Any], result: Any) -> Iterator[Any]:
    """The outputs, then the result."""
    yield from outputs
    yield result
