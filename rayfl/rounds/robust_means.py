"""Robust means of a round's messages, slice by slice on the workers, in at most two passes."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import Packet, shapes_of
from rayfl.compress.dense import DenseCodec
from rayfl.gather import CENTER, Aggregate, RobustMean
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.running_round import Round
from rayfl.rounds.worker_jobs import RobustJob

ENTRIES = 1 << 24
"""The most entries of all messages together that a call reads, so that slices do not depend on the workers."""


def robust_mean(round: Round, name: str, received: Aggregate, messages: Mapping[int, Ref]) -> Aggregate:
    """What arrived under `name`, with the robust mean of the messages of those who delivered as its result."""
    rule, executor, refs = received.gather, round.executor, list(messages.values())
    assert isinstance(rule, RobustMean)
    like = next(sent[name].decode() for ref in refs if name in (sent := executor.get(ref)[0]))
    if rule.keeps_center:
        center = round.run_state.server.get(CENTER, {}).get(name) or tree.zeros_like(like)
        codec = DenseCodec(shapes_of(center), "fp32")
        refs.append(executor.put(({name: Packet(tree.to_arrays(tree.map(torch.flatten, center)), codec)}, 1.0)))
    size, width = tree.num_entries(like), max(1, ENTRIES // len(refs))

    def jobs(decision: np.ndarray | None, outputs: int) -> list[Job]:
        cuts = [(first, min(first + width, size)) for first in range(0, size, width)]
        return [Job(RobustJob(name, *cut, decision), tuple(refs), outputs) for cut in cuts]

    measured = [one.result for one in round.run(jobs(None, 0))] if rule.measures else None
    decision = None if measured is None else checked(rule.decide)(np.sum(measured, axis=0))
    parts = [executor.get(one.outputs[0]) for one in round.run(jobs(decision, 1))]
    return replace(received, known=tree.unvector(torch.from_numpy(np.concatenate(parts)), like))
