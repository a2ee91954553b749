import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partition import Partition, Shards
from rayfl.report.partition_table import distances, holdings, table
from tests.data.toys import numbered_images
from tests.refusals import line_with

LABELS = np.array([0, 0, 0, 1, 1, 2])


def small_partition() -> tuple[Dataset, Partition]:
    """Client 0 holds labels 0 0 1, client 1 holds 0 1 2; one sample of client 1 is for validation: label 1."""
    dataset = numbered_images(LABELS, np.array([0, 1]))
    empty = Shards.empty(2)
    train = Shards.of([np.array([0, 1, 3]), np.array([2, 5])])
    validation = Shards.of([np.array([], np.int64), np.array([4])])
    return dataset, Partition(train, validation, empty, Shards.of([np.array([0]), np.array([1])]))


def test_holdings_count_the_train_labels():
    assert holdings(*small_partition()).tolist() == [[2, 1, 0], [1, 0, 1]]


def test_distances_are_total_variation_to_the_pooled_labels():
    # Pooled: (2, 2) / 4. Client 0 holds one class only: (|1 - .5| + |0 - .5|) / 2. Client 2 is like the pool.
    assert distances(np.array([[1, 0], [0, 1], [1, 1]])).tolist() == [0.5, 0.5, 0.0]
    # Five clients with a class each are 0.8 away: (|1 - .2| + 4 * .2) / 2.
    np.testing.assert_allclose(distances(3 * np.eye(5)), 0.8)


def printed(max_rows: int = 100, shown: tuple[Dataset, Partition] | None = None) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(table(*(shown or small_partition()), max_rows=max_rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_a_row_a_client():
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed().splitlines() if "│" in line]
    # Pooled (3, 1, 1) / 5. Client 0: |2/3 - .6| + |1/3 - .2| + .2, halved; client 1: .1 + .2 + .3, halved.
    assert rows == [
        ["0", "3", "0", "1", "2", "0:2 1:1", "0.20"],
        ["1", "2", "1", "1", "2", "0:1 2:1", "0.30"],
        ["all", "5", "1", "2", "3", "0:3 1:1 2:1", "mean 0.25"],
    ]


def test_owners_and_shared_test_examples_are_named():
    dataset, partition = small_partition()
    train = replace(dataset.train, groups=np.array([1, 1, 0, 1, 0, 0]))
    owned = replace(dataset, train=train, owners=["ward b", "1"])
    shared = replace(partition, test=Shards.of([np.array([0, 1]), np.array([1])]))
    text = printed(shown=(owned, shared))
    # Client 0 has the examples of the owner 1.
    assert all(cell in text for cell in ("0 (1)", "1 (ward b)", "3 (2 different)"))
    mixed = replace(owned, train=replace(train, groups=np.array([0, 1, 0, 1, 0, 1])))
    assert "(" not in printed(shown=(mixed, partition)).split("labels: class")[0]


def test_the_table_leaves_out_empty_splits_and_says_what_it_does_not_show():
    text = printed(max_rows=1)
    line_with(text, ["2 clients", "1"])
    assert "validation" in text
    assert "heldout" not in text


def test_numbers_are_counted_by_tenths_and_texts_by_samples():
    numbers, (_, partition) = np.array([[5.0], [1.0], [4.0], [2.0], [6.0], [3.0]]), small_partition()
    examples = Examples(np.zeros((6, 1), np.float32), numbers)
    heights = Dataset("heights", examples, examples, 1, "vector")
    # The tenths end at 1.5, 2, 2.5, ..., 5.5. Client 0 has 5, 1 and 2, client 1 has 4 and 3.
    assert [np.flatnonzero(row).tolist() for row in holdings(heights, partition)] == [[0, 1, 7], [3, 5]]
    texts = Dataset("texts", Examples(numbers.astype(int), numbers.astype(int)), examples, 9, "text")
    assert holdings(texts, partition).tolist() == [[3], [2]]
    several = Examples(np.zeros((6, 1), np.float32), np.array([[0, 1, 1], [0, 0, 1], [0, 1, 0]] * 2))
    tagged = Dataset("tagged", several, several, 3, "vector", classes=("red", "big", "old"))
    # Client 0 has the examples 0, 1 and 3, client 1 has 2 and 5.
    assert [partition.train[client].tolist() for client in range(2)] == [[0, 1, 3], [2, 5]]
    assert holdings(tagged, partition).tolist() == [[0, 2, 3], [0, 2, 0]]
    as_numbers = replace(tagged, train=replace(several, labels=several.labels.astype(np.float32)))
    assert all("old:3 big:2" in printed(shown=(labelled, partition)) for labelled in (tagged, as_numbers))
    assert [table(dataset, partition).row_count for dataset in (heights, texts)] == [2, 2]
