"""Data: made, of one's own, and the files of public datasets."""

import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.case import Case, Content, experiment
from tests.hostile.kinds.damage import GARBAGE, endless, folder
from tests.hostile.kinds.graph import header, saved, shaped

ROWS = np.arange(80, dtype=np.float32).reshape(20, 4)
LABELS = np.arange(20) % 2
REVIEWS = {f"own/{half}/{word}/1.txt": "good" for half in ("train", "test") for word in ("neg", "pos")}
TABLE = "label,a,b\n" + "".join(f"{row % 2},{row},{row * row}\n" for row in range(20))
IDX = {
    "train-images-idx3-ubyte": (20, 4, 4),
    "train-labels-idx1-ubyte": (20,),
    "t10k-images-idx3-ubyte": (20, 4, 4),
    "t10k-labels-idx1-ubyte": (20,),
}


# Any: options of a dataset.
def data(
    name: str,
    options: Mapping[str, Any],
    *names: str,
    code: int = 2,
    in_suite: bool = False,
    in_process: bool = False,
    partition: str = "iid",
    more: Mapping[str, Content] = {},
    **files: Content,
) -> Case:
    """A dataset that is refused in a sentence with `names`. Two underscores in a file's name are a slash, one a dot."""
    paths = {path.replace("__", "/").replace("_", "."): content for path, content in files.items()} | dict(more)
    return Case(
        "data",
        name,
        ["run", "bad.toml", "--output", "run"],
        names,
        {**paths, "bad.toml": experiment(data=options, partition=partition)},
        code=code,
        may_write=[] if code else ["run"],
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: options.
def synthetic(name: str, /, *names: str, in_suite: bool = False, **options: Any) -> Case:
    return data(name, {"name": "synthetic", **options}, *names, in_suite=in_suite)


def arrays(
    name: str, *names: str, code: int = 2, in_suite: bool = False, in_process: bool = False, **changes: object
) -> Case:
    """A folder of .npy files; what is no array is a file's content."""
    found = {"inputs": ROWS, "labels": LABELS, **changes}
    files = {
        f"own__{key.replace('_', '-')}_npy": saved(one) if isinstance(one, np.ndarray) else one
        for key, one in found.items()
    }
    paths = {
        path.replace("__", "/").replace("_", ".").replace("-", "_"): content
        for path, content in files.items()
        if content is not None
    }
    return Case(
        "data",
        name,
        ["run", "bad.toml", "--output", "run"],
        names or (["own"] if code else []),
        {**paths, "bad.toml": experiment(data={"name": "arrays", "path": "own"})},  # type: ignore[dict-item]
        code=code,
        may_write=[] if code else ["run"],
        in_suite=in_suite,
        in_process=in_process,
    )


# Any: options of a table.
def table(name: str, content: Content, *names: str, code: int = 2, in_suite: bool = False, **options: Any) -> Case:
    return data(
        name,
        {"name": "table", "path": "own.csv", **options},
        *(names or (["own.csv"] if code else [])),
        code=code,
        in_suite=in_suite,
        own_csv=content,
    )


def idx(name: str, *names: str, in_suite: bool = False, **changes: Content) -> Case:
    """Fashion-MNIST's four files, tiny, with changes: `images` or `labels` of the train split."""
    stems = {"images": "train-images-idx3-ubyte", "labels": "train-labels-idx1-ubyte"}
    files: dict[str, Content] = {f"own/{stem}": idx_file(shape) for stem, shape in IDX.items()}
    files |= {f"own/{stems[key]}": content for key, content in changes.items()}
    return Case(
        "data",
        name,
        ["run", "bad.toml"],
        names or ["own"],
        {**files, "bad.toml": experiment(data={"name": "mnist", "root": "own"})},
        in_suite=in_suite,
    )


def idx_file(shape: tuple[int, ...], told: tuple[int, ...] | None = None) -> bytes:
    """An IDX file of zeros, whose header tells another shape."""
    told = told or shape
    return bytes([0, 0, 8, len(told)]) + struct.pack(f">{len(told)}I", *told) + bytes(int(np.prod(shape)))


def images(name: str, content: Content, /, *names: str, in_suite: bool = False, **options: object) -> Case:
    """A folder of images with one that is this."""
    return Case(
        "data",
        name,
        ["run", "bad.toml"],
        names or ["a.png"],
        {
            "own/cat/a.png": content,
            "own/dog/b.png": png(4, 4),
            "bad.toml": experiment(data={"name": "image-folder", "path": "own", **options}),
        },
        in_suite=in_suite,
    )


def png(width: int, height: int) -> bytes:
    """A grey picture, black, however large: it is compressed."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    squeeze = zlib.compressobj(9)
    row, body = bytes(1 + (width + 7) // 8), b""
    for _ in range(height):
        body += squeeze.compress(row)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body + squeeze.flush()) + chunk(b"IEND", b"")


def bomb() -> bytes:
    """A .npz file of 200 kB whose inputs are 200 MB by their own header, and 20 GB by the archive's."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", shaped("(200000000, 100)", body=bytes(1 << 26)))
        archive.writestr("labels.npy", saved(LABELS))
    return file.getvalue()


def zipped(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def npz(name: str, content: Content, *names: str, in_suite: bool = False) -> Case:
    return data(
        name, {"name": "arrays", "path": "own.npz"}, *(names or ["own.npz"]), in_suite=in_suite, own_npz=content
    )


def many_zeros(path: Path) -> None:
    """An IDX file of 20 images as a gzip file of 1 MB, with 1 GB of zeros behind them."""
    with gzip.open(path.with_suffix(".gz"), "wb", compresslevel=9) as file:
        file.write(idx_file((20, 4, 4)))
        for _ in range(64):
            file.write(bytes(1 << 24))
    path.unlink(missing_ok=True)


CASES = [
    arrays("valid arrays", code=0),
    table("valid table", TABLE, code=0),
    # Made data.
    synthetic("a huge dim", "dim=", dim=10**13, in_suite=True),
    synthetic("dim of 10^30", "data.dim", dim=10**30),
    synthetic("dim zero", "data.dim", dim=0),
    synthetic("huge num_classes", "num_classes=", num_classes=10**13),
    synthetic("one class", "data.num_classes", num_classes=1),
    synthetic("huge num_groups", "num_groups=", num_groups=10**12, in_suite=True),
    synthetic("no groups", "data.num_groups", num_groups=0),
    synthetic("huge samples_per_group", "samples_per_group=", samples_per_group=10**13),
    synthetic("groups without samples", "data.samples_per_group", samples_per_group=0),
    synthetic("a huge shape", "shape=[1000000, 1000000, 1000000]", shape=[10**6, 10**6, 10**6]),
    synthetic("a shape of two", "data.shape", shape=[4, 4]),
    synthetic("groups of -5 samples", "data.samples_per_group", samples_per_group=-5),
    synthetic("-5 groups", "data.num_groups", num_groups=-5),
    synthetic("alpha NaN", "data.alpha", alpha=float("nan")),
    synthetic("alpha negative", "data.alpha", alpha=-1.0),
    synthetic("test_ratio one", "data.test_ratio", test_ratio=1.0),
    data("huge data.length", {"name": "imdb", "root": "own", "length": 10**13}, "length", more=REVIEWS),
    data("huge padding", {"name": "mnist", "padding": 10**9}, "data.padding"),
    data("a root of nobody", {"name": "mnist", "root": "~nobody-of-this-name/x"}, "~nobody-of-this-name/x"),
    data("a root with a null byte", {"name": "mnist", "root": "a\0b"}, "data.root"),
    data("a root of 300 letters", {"name": "mnist", "root": "x" * 300}, "xxx"),
    data("a root that is a number", {"name": "mnist", "root": 5}, "data.root"),
    data("a root that is empty", {"name": "mnist", "root": "empty"}, "empty", empty=folder),
    data("an unknown option", {"name": "digits", "root": "x"}, "data.root"),
    data("more clients than samples", {"name": "arrays", "path": "own.npz"}, "clients",
         own_npz=zipped(inputs=ROWS[:3], labels=LABELS[:3])),
    # Arrays.
    data("no file", {"name": "arrays", "path": "absent.npz"}, "absent.npz", in_process=True),
    data("no path", {"name": "arrays", "path": ""}, "data.path"),
    data("a path with a null byte", {"name": "arrays", "path": "a\0b"}, "data.path"),
    data("the home of nobody", {"name": "arrays", "path": "~nobody-of-this-name/x.npz"}, "~nobody-of-this-name"),
    npz("garbage .npz", GARBAGE),
    npz("empty .npz", b""),
    npz("half an archive", zipped(inputs=ROWS, labels=LABELS)[:200]),
    npz("an archive of nothing", zipped()),
    npz("no labels", zipped(inputs=ROWS), "labels"),
    npz("a bomb", lambda path: path.write_bytes(bomb()), in_suite=True),
    npz("a FIFO for an archive", os.mkfifo),
    npz("a device for an archive", endless),
    arrays("labels of fractions", "own", labels=LABELS + 0.5, in_suite=True),
    arrays("labels below zero", "own", labels=LABELS - 1),
    arrays("labels NaN", "own", labels=np.full(20, np.nan)),
    arrays("labels infinite", "own", labels=np.full(20, np.inf)),
    arrays("labels of 10^15", "own", labels=LABELS * 10**15),
    arrays("labels of uint64", "own", labels=np.full(20, 2**64 - 1, np.uint64)),
    arrays("labels too few", "own", labels=LABELS[:19]),
    arrays("labels of two axes", "own", labels=np.ones((20, 2))),
    arrays("no samples", "own", inputs=ROWS[:0], labels=LABELS[:0]),
    arrays("inputs NaN", "own", inputs=np.where(ROWS == 7, np.nan, ROWS), in_process=True),
    arrays("inputs infinite", "own", inputs=np.where(ROWS == 7, np.inf, ROWS)),
    arrays("inputs of 1e300", "own", inputs=np.full((20, 4), 1e300)),
    arrays("inputs of no axis", "own", inputs=np.array(1.0)),
    arrays("inputs of texts", "own", inputs=np.array([["a", "b"]] * 20)),
    arrays("inputs complex", "own", inputs=ROWS.astype(complex)),
    arrays("inputs without values", "own", inputs=np.zeros((20, 0), np.float32)),
    arrays("owners too few", "own", owners=np.zeros(3, int)),
    arrays("a test of another shape", "own", test_inputs=np.ones((5, 3), np.float32), test_labels=LABELS[:5]),
    arrays("a test without labels", "own", test_inputs=ROWS[:5]),
    arrays("an empty test", "own", test_inputs=ROWS[:0], test_labels=LABELS[:0]),
    arrays("pickled labels", "own", labels=saved(np.array([{}] * 20, dtype=object), allow_pickle=True)),
    arrays("inputs of 10^13 by their header", "own", inputs=shaped("(10000000, 1000000)")),
    arrays("inputs with an unclosed header", "own", inputs=header("{'descr': '|b1', 'shape': (4, 4), ")),
    arrays("inputs with a deep header", "own", inputs=header("(" * 20_000 + ")" * 20_000 + "\n")),
    # Tables.
    table("an empty table", ""),
    table("a header alone", "label,a,b\n"),
    table("garbage for a table", GARBAGE),
    table("no column of labels", TABLE, "class", labels="class"),
    table("a row too short", TABLE + "1,2\n"),
    table("NaN in a table", TABLE.replace("4,16", "4,nan")),
    table("labels of fractions in a table", TABLE.replace("1,3,", "1.5,3,")),
    table("an unknown column", TABLE, "c", features=["a", "c"]),
    table("a folder for a table", folder),
    table("a device for a table", endless),
    # IDX and pictures.
    idx("IDX garbage", images=GARBAGE),
    idx("IDX cut", images=idx_file((20, 4, 4))[:100]),
    idx("IDX that tells too much", images=idx_file((20, 4, 4), (2**31, 2**31, 4))),
    idx("IDX of 250 axes", images=bytes([0, 0, 8, 250]) + bytes(1000)),
    idx("IDX with a label of 200", "labels", labels=bytes([0, 0, 8, 1, 0, 0, 0, 20]) + bytes([200] * 20)),
    idx("IDX with too few labels", labels=idx_file((19,))),
    idx("IDX without samples", "train", images=idx_file((0, 4, 4)), labels=idx_file((0,))),
    idx("IDX a gzip bomb", images=many_zeros),
    images("an image that is none", GARBAGE),
    images("an empty image", b""),
    images("half an image", png(64, 64)[:45]),
    images("an image bomb", lambda path: path.write_bytes(png(20_000, 20_000))),
    images("images of two sizes", png(5, 5), "side"),
    images("a side of 10^9", png(4, 4), "data.side", side=10**9),
    images("a FIFO for an image", os.mkfifo),
]  # fmt: skip
