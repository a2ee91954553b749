"""The setup in the object store, without the data that nodes map from files of their own or on a shared disk.

If a node lacks the files, Ray sends it the data once.
"""

from dataclasses import dataclass, replace

import ray
from ray import ObjectRef

from actors.errors import ClusterError
from rayfl.data.mapped import MappedDataset
from rayfl.rounds.setup import Setup


@dataclass(frozen=True)
class MappedSetup:
    """A setup whose dataset lacks the arrays that are mapped from files."""

    setup: Setup
    dataset: MappedDataset


class FilesMissing(Exception):
    """The dataset's files are not on this node, or are not the same."""


def put_setup(setup: Setup) -> ObjectRef:
    """Put a setup into the object store, for `read_setup`."""
    apart = MappedDataset.of(setup.dataset)
    if not apart.files:
        return ray.put(setup)
    return ray.put(MappedSetup(replace(setup, dataset=apart.rest), apart))


def put_whole(reference: ObjectRef) -> ObjectRef:
    """Put the setup again, with all data, for nodes without the files.

    Raise ClusterError if this node lacks them, too.
    """
    try:
        return ray.put(read_setup(reference))
    except FilesMissing as error:
        raise ClusterError(f"{error}, nor on the coordinator's node: restore them, then run it again") from None


def read_setup(reference: ObjectRef) -> Setup:
    """Read the setup and map its dataset. Raise FilesMissing if this node lacks the files."""
    found = ray.get(reference)
    if not isinstance(found, MappedSetup):
        return found
    dataset = found.dataset.open()
    if dataset is None:
        folders = sorted({str(file.path.parent) for file in found.dataset.files.values()})
        raise FilesMissing(f"the files in {', '.join(folders)} are not on node {ray.util.get_node_ip_address()}")
    return replace(found.setup, dataset=dataset)
