"""A method that brings a pretended GPU along to the actors that Ray gives a share of one."""

import os
from dataclasses import replace

import torch

from rayfl.methods.base import Capabilities, Context, Finished, State
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry
from tests.pretended_gpu import PretendedGpu, with_autograd

# Ray sets it for such actors. The machine has a second GPU, which they do not see.
if os.environ.get("CUDA_VISIBLE_DEVICES"):
    with_autograd()
    PretendedGpu(count=2).__enter__()


class OnAQuarter(FedAvg):
    """FedAvg, which says where it was and what it may take there."""

    capabilities = Capabilities(on_device=True)

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        found = {
            "gpu/fraction": torch.cuda.get_per_process_memory_fraction(),
            "gpu/tensors": float(all(tensor.is_cuda for tensor in carry["params"].values())),
        }
        return replace(finished, metrics={**finished.metrics, **found})
