import numpy as np
import pytest

from rayfl.data.sources.imdb import IMDB, words
from tests.refusals import refused

REVIEWS = {
    "train/neg/0_2.txt": "Bad bad film.<br /><br />It isn't good",
    "train/neg/10_1.txt": "bad",
    "train/pos/0_9.txt": "good good film, a GOOD one",
    "test/neg/0_3.txt": "bad plot",
    "test/pos/0_8.txt": "Good film!",
}


@pytest.fixture
def root(tmp_path):
    for name, text in REVIEWS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_words_are_numbered_by_how_often_the_train_split_has_them(root):
    # good 4, bad 3, film 2, then once each and by the alphabet: a, isn't, it, one.
    dataset = IMDB(root=root, length=7).load()
    assert dataset.train.inputs.tolist() == [
        [3, 3, 4, 7, 6, 2, 0],
        [3, 0, 0, 0, 0, 0, 0],
        [2, 2, 4, 5, 2, 8, 0],
    ]
    # "plot" is not in the train split.
    assert dataset.test.inputs[:, :3].tolist() == [[3, 1, 0], [2, 4, 0]]
    assert (dataset.train.labels.tolist(), dataset.test.labels.tolist()) == ([0, 0, 1], [0, 1])
    assert {dataset.train.inputs.dtype, dataset.train.labels.dtype} == {np.dtype(np.int64)}
    assert (dataset.kind, dataset.num_classes, dataset.input_shape) == ("text", 2, (7,))


def test_the_vocabulary_counts_padding_and_unknown_words(root):
    dataset = IMDB(root=root, length=7, vocabulary=4).load()
    assert dataset.train.inputs[2].tolist() == [2, 2, 1, 1, 2, 1, 0]
    assert dataset.train.inputs.max() == 3


def test_long_reviews_lose_their_end(root):
    assert IMDB(root=root, length=2).load().train.inputs.tolist() == [[3, 3], [3, 0], [2, 2]]


def test_tokenizers():
    text = "It's GREAT...<br />top_notch 10/10, déjà 'vu'"
    assert words(text) == ["it's", "great", "top", "notch", "10", "10", "déjà", "vu"]


def test_an_empty_class_and_a_missing_folder_are_told_what_to_fetch(root, tmp_path):
    (root / "test/pos/0_8.txt").unlink()
    with refused(names=["test/pos", ".txt", "https://ai.stanford"]):
        IMDB(root=root).load()
    with refused(names=["/absent", "data.root"]):
        IMDB(root=tmp_path / "absent").load()
