"""Partitions from files, as other simulators and people write them, and the files that rayfl writes."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partition import Partition, PartitionScheme
from rayfl.data.partitions.from_file import write_partition
from rayfl.determinism.seeding import generator
from rayfl.experiment.identity import kept_files
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, refused

CLIENTS = {"0": [1, 0, 2, 3], "1": [4, 5], "2": [6, 11]}
INTEGERS = {int(client): indices for client, indices in CLIENTS.items()}
PAIRS = [(client, index) for client, indices in CLIENTS.items() for index in indices]


def examples(count: int) -> Examples:
    return Examples(np.zeros((count, 2), np.float32), np.arange(count) % 3)


TOY = Dataset("toy", examples(12), examples(6), 3, "vector")


def split(path: Path, content: Any, num_clients: int = 3, dataset: Dataset = TOY, **options: Any) -> Partition:
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    scheme = make(PartitionScheme, {"name": "file", "path": str(path), **options})
    return scheme.split(dataset, num_clients, generator(0))


def lists(partition: Partition, name: str = "train") -> list[list[int]]:
    shards = partition.split(name)
    return [shards[client].tolist() for client in range(len(shards))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.json", CLIENTS),
        ("p.json", [*CLIENTS.values()]),
        ("p.json", {f"client {client}": indices for client, indices in reversed(CLIENTS.items())}),
        ("p.json", {client: {"train": indices} for client, indices in CLIENTS.items()}),
        ("map.txt", "{\n" + "".join(f"{k}: [\n{', '.join(map(str, v))}\n],\n" for k, v in INTEGERS.items()) + "}\n"),
        ("p.txt", repr({client: np.array(indices) for client, indices in INTEGERS.items()})),
        ("p.txt", repr({client: [*np.array(indices)] for client, indices in INTEGERS.items()})),
        ("p.pkl", pickle.dumps({client: np.array(indices) for client, indices in INTEGERS.items()})),
        ("p.csv", "client,index\n" + "".join(f"{client},{index}\n" for client, index in PAIRS)),
        ("p.csv", "idx;partition_id\n" + "".join(f"{index};{client}\n" for client, index in PAIRS)),
        ("p.csv", "client,indices\n" + "".join(f'{client},"{indices}"\n' for client, indices in CLIENTS.items())),
    ],
)
def test_files_of_other_simulators(tmp_path: Path, name: str, content: Any, caplog: pytest.LogCaptureFixture):
    partition = split(tmp_path / name, content)
    assert lists(partition) == [*CLIENTS.values()]
    assert sorted(partition.test.indices.tolist()) == [*range(6)] and partition.test.sizes.tolist() == [2, 2, 2]
    check_sentence(caplog.messages[0], [name, "4 of 12", "no client"])


def test_test_examples_are_those_of_the_file_or_a_share(tmp_path: Path):
    by_client = {client: {"train": indices, "test": [int(client)]} for client, indices in CLIENTS.items()}
    by_split = {"train": CLIENTS, "test": {"0": [0], "1": [1], "2": [2]}}
    rows = [f"{client},{index},train\n" for client, index in PAIRS] + [
        f"{client},{client},test\n" for client in CLIENTS
    ]
    for name, content in (
        ("a.json", by_client),
        ("b.json", by_split),
        ("c.csv", "client,index,split\n" + "".join(rows)),
    ):
        assert lists(split(tmp_path / name, content), "test") == [[0], [1], [2]], name
    assert split(tmp_path / "p.json", CLIENTS, test="none").test.sizes.tolist() == [0, 0, 0]
    # Client 1 has the labels 1 and 2, in equal shares.
    assert lists(split(tmp_path / "p.json", CLIENTS, test="labels"), "test")[1] == [1, 2, 4, 5]
    with refused(names=["a.json", "partition.test='none'", "remove"]):
        split(tmp_path / "a.json", by_client, test="none")
    whole = split(tmp_path / "rows.csv", "client\n" + "".join(f"{row % 3}\n" for row in range(12)))
    assert lists(whole)[1] == [1, 4, 7, 10]


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("p.json", {"0": [1], "1": [2]}, ["clients.count=3", "p.json has 2 clients"]),
        ("p.json", {**CLIENTS, "2": [12]}, ["client '2'", "index 12", "0 to 11", "data.test_share"]),
        ("p.json", {**CLIENTS, "2": [-1]}, ["client '2'", "index -1", "0 to 11"]),
        ("p.json", {**CLIENTS, "2": [6, 6]}, ["client '2'", "index 6 twice"]),
        ("p.json", {**CLIENTS, "2": [0.5]}, ["client '2'", "[0.5]", "whole numbers"]),
        ("p.json", {**CLIENTS, "2": [[1], [2, 3]]}, ["client '2'", "whole numbers"]),
        ("p.json", {**CLIENTS, "2": []}, ["client 2", "without train data", "p.json"]),
        ("p.json", {"train": CLIENTS, "test": {"7": [1]}}, ["client '7'", "no train examples"]),
        ("p.json", {"test": CLIENTS}, ["'test'", "no 'train'"]),
        ("p.json", {}, ["p.json", "no clients", "partition.path"]),
        ("p.json", "{bad", ["p.json", "no JSON", "partition.path"]),
        ("p.csv", "0,1\n1,2\n", ["'0' and '1'", "client_id", "index"]),
        ("p.csv", "client\n0\n1\n2\n", ["3 rows", "12 train examples", "index"]),
        ("p.pkl", b"cos\nsystem\n(S'true'\ntR.", ["it calls os.system", "partition.path"]),
    ],
)
def test_wrong_files_get_a_sentence(tmp_path: Path, name: str, content: Any, names: list[str]):
    with refused(names=names):
        split(tmp_path / name, content)


def test_what_data_writes_gives_the_same_run(tmp_path: Path):
    toml = tmp_path / "a.toml"
    toml.write_text(
        'rounds = 1\ndata = "digits"\nclients = {count = 5, unseen = 0.2}\n'
        'partition = {name = "dirichlet-client", alpha = 0.3}\n'
        'model = "logistic"\nmethod = {name = "fedavg", lr = 0.1}\nsplits = {validation_ratio = 0.2}\n'
        "output = {report = false, save_models = false}\n"
    )
    out = tmp_path / "part.json"
    shown = rayfl("data", toml, "--write-partition", out)
    assert shown.exit_code == 0, shown.output
    refused(rayfl("data", toml, "--write-partition", out), names=[out, "exists", "--write-partition"])
    read = rayfl("data", toml, f"partition={{name='file', path='{out}'}}")
    assert read.stdout == shown.stdout
    for name, override in (("one", "rounds=1"), ("two", f"partition={{name='file', path='{out}'}}")):
        result = rayfl("run", toml, override, "--inline", "--output", tmp_path / name)
        assert result.exit_code == 0, result.output
    first, second = (pd.read_parquet(tmp_path / name / "records" / "metrics.parquet") for name in ("one", "two"))
    pd.testing.assert_frame_equal(first, second)
    assert any(path.name.startswith("partition-") for path in (tmp_path / "two" / "files").iterdir())


def test_a_partition_is_written_in_its_order(tmp_path: Path):
    write_partition(split(tmp_path / "p.json", CLIENTS, test="none"), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"train": CLIENTS, "test": {"0": [], "1": [], "2": []}}
    with refused(names=["nowhere", "--write-partition"]):
        write_partition(split(tmp_path / "p.json", CLIENTS), tmp_path / "nowhere" / "out.json")
    with refused(names=["out.csv", "--write-partition", "out.json"]):
        write_partition(split(tmp_path / "p.json", CLIENTS), tmp_path / "out.csv")


def test_a_folder_of_arrays_has_a_client_in_each_and_is_kept_as_one_file(tmp_path: Path):
    for client, indices in CLIENTS.items():
        np.save(tmp_path / f"site-{int(client) + 9}.npy", np.array(indices))
    scheme = make(PartitionScheme, {"name": "file", "path": str(tmp_path)})
    assert lists(scheme.split(TOY, 3, generator(0))) == [*CLIENTS.values()]
    kept = kept_files({"partition": {"name": "file", "path": str(tmp_path)}})
    name, content = next(iter(kept.contents.items()))
    assert name.endswith(".json") and lists(split(tmp_path / "kept.json", content)) == [*CLIENTS.values()]
    (tmp_path / "empty").mkdir()
    empty = make(PartitionScheme, {"name": "file", "path": str(tmp_path / "empty")})
    refused(lambda: empty.split(TOY, 3, generator(0)), names=["empty", ".npy", "partition.path"])


def test_joined_indices_count_train_and_test_together(tmp_path: Path):
    dataset = Dataset("toy", examples(12), replace(examples(6), labels=np.array([3, 4, 5, 3, 4, 5])), 6, "vector")
    clients = [{"train": [17, 0, 4], "val": [], "test": [12, 1]}, {"train": [13, 5], "val": [], "test": [2]}]
    file = tmp_path / "partition.pkl"
    file.write_bytes(pickle.dumps({"separation": {}, "data_indices": [*map(as_arrays, clients)]}))
    scheme = make(PartitionScheme, {"name": "file", "path": str(file), "joined": True})
    counted, partition = scheme.assign(dataset, 2, generator(0))
    for name, split_examples in (("train", counted.train), ("test", counted.test)):
        labels = [split_examples.labels[indices].tolist() for indices in lists(partition, name)]
        both = np.concatenate([dataset.train.labels, dataset.test.labels])
        assert labels == [both[client[name]].tolist() for client in clients]
    assert (len(counted.train), len(counted.test)) == (5, 3)
    alone = make(PartitionScheme, {"name": "file", "path": str(file)})
    refused(lambda: alone.split(dataset, 2, generator(0)), names=["17", "partition.joined=true"])


def as_arrays(client: dict[str, list[int]]) -> dict[str, np.ndarray]:
    return {split: np.array(indices, np.int64) for split, indices in client.items()}
