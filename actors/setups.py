"""The setup in the object store: once, and without the data that every node maps from its own files or shared storage.

A node that lacks the files is sent the data, once, as any object.
"""

from dataclasses import dataclass, replace

import ray
from ray import ObjectRef

from actors.errors import ClusterError
from rayfl.data.mapped import MappedDataset
from rayfl.rounds.setup import Setup


@dataclass(frozen=True)
class MappedSetup:
    """A setup whose dataset lacks what is mapped from files."""

    setup: Setup
    dataset: MappedDataset


class FilesMissing(Exception):
    """The dataset's files are not on this node, or are others."""


def put_setup(setup: Setup) -> ObjectRef:
    """Put a setup into the object store, for `read_setup`."""
    apart = MappedDataset.of(setup.dataset)
    if not apart.files:
        return ray.put(setup)
    return ray.put(MappedSetup(replace(setup, dataset=apart.rest), apart))


def put_whole(reference: ObjectRef) -> ObjectRef:
    """Put the setup again, with all data, for nodes that lack the files. ClusterError where they are gone here too."""
    try:
        return ray.put(read_setup(reference))
    except FilesMissing as error:
        raise ClusterError(f"{error}, nor on the coordinator's: restore them, then run it again") from None


def read_setup(reference: ObjectRef) -> Setup:
    """The setup, its dataset mapped. FilesMissing where the files are not here."""
    found = ray.get(reference)
    if not isinstance(found, MappedSetup):
        return found
    dataset = found.dataset.open()
    if dataset is None:
        folders = sorted({str(file.path.parent) for file in found.dataset.files.values()})
        raise FilesMissing(f"the files in {', '.join(folders)} are not on node {ray.util.get_node_ip_address()}")
    return replace(found.setup, dataset=dataset)
