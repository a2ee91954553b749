"""A partition from a file: which client has which examples, as other simulators and people write it."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rayfl.data.datasets import Examples
from rayfl.data.partition import Dataset, Field, Partition, PartitionScheme, RayflError, Shards
from rayfl.data.partitions.index_folder import folder_content
from rayfl.data.partitions.matching_test_split import matching_test_split
from rayfl.data.sources.client_files import owner_numbers
from rayfl.data.sources.csv_files import Dialect, read_csv
from rayfl.data.sources.pickled_data import values_of
from rayfl.data.sources.splits import split_of
from rayfl.errors import log_once
from rayfl.limits.regular_files import expanded, read_bytes, read_text, reading
from rayfl.settings import listed, shown

_CLIENT = ("client", "client_id", "clientid", "cid", "partition", "partition_id", "user", "user_id", "node", "owner")
_INDEX = ("index", "idx", "indices", "sample", "sample_id", "example", "data_index", "row")
_ADVICE = (
    'give partition.path a JSON file such as {"0": [3, 5], "1": [0, 7]}, or a CSV file with columns client and index'
)
_MOST_TEXT_BYTES = 64 << 20
_TEST_EXAMPLES = 100

# Any: what a file holds.
Indices = Mapping[str, Any]
"""The indices of each client."""


class PartitionFile(PartitionScheme):
    """The clients and their examples that a file lists, by the places of the examples in the train split, from 0.

    JSON: {client: [index, ...]}, a list of such lists, {client: {"train": [...], "test": [...]}}, or {"train": {client:
    [...]}, "test": {...}}; the same as a text of Python's (net_dataidx_map.txt of FedML and NIID-Bench), or as a pickle
    of plain values and arrays (FedLab), of which nothing is run. CSV: the columns client and index, and perhaps split;
    or client alone, with a row for each train example. A folder of .npy files has the train examples of a client in
    each (NVFlare: site-1.npy). Clients have the order of their numbers, or names.

    FL-bench's partition.pkl, a list of splits called data_indices, counts train and test examples together, first those
    of train: set `joined`, and each client's examples may come from both.

    test: a client's test examples if the file has none. "iid": an equal part, drawn at random; "labels": up to 100 in
    the shares of its train labels (`matching_test_split`); "none": none. `rayfl data FILE --write-partition OUT.json`
    writes such a file.
    """

    name = "file"
    path: str = Field(
        min_length=1,
        examples=["my_partition.json"],
        description="a JSON, CSV, text or pickle file, or a folder with an .npy file for each client",
    )
    joined: bool = Field(
        default=False, description="indices count the examples of train and test together, first those of train"
    )
    test: Literal["iid", "labels", "none"] = Field(
        default="iid", description="test examples of each client if the file has none"
    )

    def assign(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> tuple[Dataset, Partition]:
        """As every scheme; of a joined dataset, its examples that the clients have."""
        return super().assign(self._chosen(dataset) if self.joined else dataset, num_clients, generator)

    def _chosen(self, dataset: Dataset) -> Dataset:
        """The examples that the clients have of a joined dataset, each split in the order of their indices."""
        splits = _read(self.path, len(dataset.train) + len(dataset.test))
        if "test" not in splits:
            raise RayflError(
                f"{self.path} has no test examples of its clients, which partition.joined needs, as it may train "
                "on those of the data; remove it"
            )
        parts = [dataset.train, dataset.test]
        inputs, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("inputs", "labels"))
        rows = {split: self._rows(split, clients, len(labels)) for split, clients in splits.items()}
        if len(shared := np.intersect1d(rows["train"], rows["test"])):
            raise RayflError(f"{self.path} has the example {shared[0]} in train and in test; leave it out of one")
        train, test = (Examples(inputs[rows[split]], labels[rows[split]], place=dataset.train.place) for split in rows)
        return replace(dataset, train=train, test=test)

    def _rows(self, split: str, clients: Indices, size: int) -> np.ndarray:
        """The rows of all clients in a split, ascending."""
        return np.unique(self._shards(split, clients, [*clients], size).indices)

    def split(self, dataset: Dataset, num_clients: int, generator: np.random.Generator) -> Partition:
        """Assign the examples. Raise RayflError if the file has another number of clients, or wrong indices."""
        splits = _read(self.path, len(dataset.train))
        if self.joined:
            splits = {split: _renumbered(clients) for split, clients in splits.items()}
        clients = owner_numbers({*splits["train"]})
        if len(clients) != num_clients:
            raise RayflError(
                f"clients.count={num_clients}, but {self.path} has {len(clients)} clients; set it to {len(clients)}"
            )
        train = self._shards("train", splits["train"], [*clients], len(dataset.train))
        if num_unused := len(dataset.train) - len(np.unique(train.indices)):
            log_once(WARNING, f"{self.path}: {num_unused} of {len(dataset.train)} train examples belong to no client")
        if "test" in splits:
            if self.is_given("test"):
                raise RayflError(f"{self.path} has test examples of its clients; remove partition.test={self.test!r}")
            test = self._shards("test", splits["test"], [*clients], len(dataset.test))
        else:
            test = self._test(dataset, train, generator)
        return self.finish(train, test, f"give each client of {self.path} an example")

    def _test(self, dataset: Dataset, train: Shards, generator: np.random.Generator) -> Shards:
        if self.test == "none":
            return Shards.empty(len(train))
        if self.test == "iid":
            return Shards.even(generator.permutation(len(dataset.test)), len(train))
        if not dataset.has_classes:
            raise RayflError("partition.test='labels' needs one class for each example; take 'iid' or 'none'")
        return matching_test_split(dataset, train, _TEST_EXAMPLES, generator)

    def _shards(self, split: str, indices: Indices, clients: Sequence[str], size: int) -> Shards:
        """The shards of a split. Raise RayflError for what is no index of its `size` examples, or is there twice."""
        if strange := sorted({*indices} - {*clients}):
            raise RayflError(f"{self.path} has {split} examples of client {strange[0]!r}, which has no train examples")
        lists = list[np.ndarray]()
        for client in clients:
            numbers = _whole_numbers(self.path, client, indices.get(client, []))
            wrong = numbers[(numbers < 0) | (numbers >= size)]
            if len(wrong):
                raise RayflError(
                    f"{self.path} gives client {client!r} the {split} index {wrong[0]}; the {size} {split} examples "
                    f"have the indices 0 to {size - 1}, without those that data.test_share holds out: to keep all, "
                    "give test examples of their own; if they count train and test together, set partition.joined=true"
                )
            values, counts = np.unique(numbers, return_counts=True)
            if (counts > 1).any():
                raise RayflError(f"{self.path} gives client {client!r} the {split} index {values[counts > 1][0]} twice")
            lists.append(numbers)
        return Shards.of(lists)


def _renumbered(clients: Indices) -> Indices:
    """The indices of each client among those of all clients, ascending."""
    lists = {client: np.asarray(indices, np.int64) for client, indices in clients.items()}
    rows = np.unique(np.concatenate([*lists.values()]))
    return {client: np.searchsorted(rows, indices) for client, indices in lists.items()}


# Any: what a file holds.
def _whole_numbers(path: str, client: str, indices: Any) -> np.ndarray:
    try:
        numbers = np.array(indices)
    except ValueError:
        numbers = np.empty((0, 0), object)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise RayflError(f"{path} gives client {client!r} {shown(indices)}; give each client a list of whole numbers")
    return numbers.astype(np.int64)


def write_partition(partition: Partition, path: Path) -> None:
    """Write the train and test examples of each client as a file that `PartitionFile` reads.

    Raise RayflError if the name is not that of a JSON file, or if the file exists or cannot be written.
    """
    if path.suffix.lower() in (".csv", ".tsv", ".pkl", ".pickle"):
        raise RayflError(f"--write-partition={path.name} is no name of a JSON file; use {path.stem}.json")
    splits = {
        split: {str(client): shards[client].tolist() for client in range(len(shards))}
        for split, shards in (("train", partition.train), ("test", partition.test))
    }
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(splits, file)
    except FileExistsError:
        raise RayflError(
            f"{path} exists, and is not replaced; remove it, or give --write-partition another path"
        ) from None
    except OSError as error:
        raise RayflError(f"{path} cannot be written ({error.strerror}); give --write-partition another path") from None


def _read(path: str, num_train: int) -> dict[str, Indices]:
    """The indices of each client by split, "train" and perhaps "test". Raise RayflError if the file has none."""
    file = expanded(path)
    with reading(file, _ADVICE, pa.ArrowException):
        if file.is_dir():
            return {"train": json.loads(folder_content(file))}
        if file.suffix.lower() in (".csv", ".tsv"):
            return _of_table(path, read_csv(file, Dialect()), num_train)
        document = values_of(read_bytes(file)) if file.suffix in (".pkl", ".pickle") else _of_text(read_text(file))
        if isinstance(document, dict) and isinstance(document.get("data_indices"), list):
            # FL-bench's: without its validation examples, which are empty unless asked for.
            document = [
                {key: indices for key, indices in client.items() if len(indices)} for client in document["data_indices"]
            ]
        if isinstance(document, list | np.ndarray):
            document = dict(enumerate(document))
        if not isinstance(document, dict) or not document:
            raise ValueError("it has no clients")
    clients = {str(name): value for name, value in document.items()}
    if all(isinstance(value, dict) for value in clients.values()):
        if not all(split_of(name) for name in clients):
            # By client and split.
            inner = {name for splits in clients.values() for name in splits}
            clients = {
                split: {name: splits[split] for name, splits in clients.items() if split in splits} for split in inner
            }
        return _train_and_test(path, clients)
    return {"train": clients}


# Any: what a file holds.
def _train_and_test(path: str, named: Mapping[str, Mapping[Any, Any]]) -> dict[str, Indices]:
    """The splits by their names; validation examples are the test examples if there are no others."""
    splits: dict[str, Indices] = {}
    for name, clients in named.items():
        if (split := split_of(name)) is None or split in splits:
            raise RayflError(f"{path} has the split {name!r}; give train and test, each once")
        splits[split] = {str(client): indices for client, indices in clients.items()}
    if "train" not in splits:
        raise RayflError(f"{path} has {listed([*map(repr, named)], 'and')}, and no 'train'; {_ADVICE}")
    if "validation" in splits and splits.setdefault("test", splits["validation"]) is not splits["validation"]:
        log_once(WARNING, f"{path}: its validation examples are not used; splits.validation_ratio cuts some from train")
    return {split: splits[split] for split in ("train", "test") if split in splits}


# Any: what a text holds.
def _of_text(text: str) -> Any:
    """The value of a JSON text, or of one of Python's. Raise ValueError if it is neither."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists are nested too deep") from None
    except ValueError as error:
        if not re.match(r"\s*[\[{]", text) or len(text) > _MOST_TEXT_BYTES:
            raise
        # numpy writes np.int64(3) and array([3, 5]).
        plain = re.sub(r"\b(?:np\.)?[a-z]+\d*\(([^()]*)\)", r"\1", text)
        try:
            return ast.literal_eval(plain)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            raise ValueError(f"it is no JSON: {error}") from None


def _of_table(path: str, table: pa.Table, num_train: int) -> dict[str, Indices]:
    """The indices of each client by split, from a row per example, or a list of examples per row."""
    names = {name.lower(): name for name in table.column_names}
    client, index = (next((names[name] for name in words if name in names), None) for words in (_CLIENT, _INDEX))
    if client is None:
        raise RayflError(
            f"{path} has {listed([*map(repr, table.column_names)], 'and')}, and no column called "
            f"{listed([*_CLIENT], 'or')}: name its columns client and index in a first row"
        )
    clients = np.array(list(map(str, table.column(client).to_pylist())))
    if index is None and table.num_rows != num_train:
        raise RayflError(
            f"{path} has {table.num_rows} rows and no column index; give one client for each of the {num_train} train "
            "examples, or a column index"
        )
    # Any: numbers, or texts with several.
    indices: list[Any] = [*range(table.num_rows)] if index is None else table.column(index).to_pylist()
    of_split = table.column(names["split"]).to_pylist() if "split" in names else ["train"] * table.num_rows
    splits: dict[str, dict[str, list[Any]]] = {}
    for split, owner, entry in zip(of_split, clients, indices, strict=True):
        numbers = [*map(int, re.findall(r"\d+", entry))] if isinstance(entry, str) else [entry]
        splits.setdefault(str(split), {}).setdefault(str(owner), []).extend(numbers)
    return _train_and_test(path, splits)
