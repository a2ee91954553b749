"""Random and mutated files: every reader refuses what it does not read with ValueError, of which `RayflError` and
`DamagedFile` are kinds."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from rayfl.population.availability import read_trace
from rayfl.run_directory.record import SCHEMAS, Stream, read_records
from rayfl.run_directory.states import load_states, save_states
from rayfl.topology.graph_file import read_links
from rayfl.tree import PackedBits
from tests.hostile.test_decoders import LONG, PACKETS, fuzz

FEW, MANY = 20, 2_000


def state_file(path: Path) -> None:
    state = {"w": np.ones((3, 2), np.float32), "mask": PackedBits(np.zeros(1, np.uint8), (3,)), "in": {"x": np.ones(1)}}
    save_states(path, {"0": {**state, "sent": PACKETS["mask"]}, "1": state})


def table_file(path: Path) -> None:
    pq.write_table(SCHEMAS["rounds"].empty_table(), path)


def stream_file(path: Path) -> None:
    stream = Stream(path, SCHEMAS["metrics"].empty_table())
    for round in range(3):
        stream.append(round, [(None, "loss", 0.5), (1, "accuracy", 0.25)])
    stream.close()


def npy_file(path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.eye(4))
    path.write_bytes(file.getvalue())


FILES: Mapping[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "states": ("states.safetensors", state_file, lambda path: dict(load_states(path))),
    "table": ("records/rounds.parquet", table_file, lambda path: read_records(path.parents[1], "rounds")),
    "stream": ("records/metrics.arrows", stream_file, lambda path: read_records(path.parents[1], "metrics")),
    "graph": ("graph.npy", npy_file, lambda path: read_links(path, 4)),
    "edges": ("graph.csv", lambda path: path.write_text("0 1\n1 2\n2,3\n"), lambda path: read_links(path, 4)),
    "trace": (
        "trace.csv",
        lambda path: path.write_text("client,first_round,last_round\n0,0,9\n1,3,5\n"),
        lambda path: read_trace(path, 4),
    ),
}
"""A file's name, what writes it, and what reads it."""


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=LONG)])
@pytest.mark.parametrize("kind", FILES)
def test_a_mutated_file_is_read_or_refused(kind: str, examples: int, tmp_path: Path):
    name, write, read = FILES[kind]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    whole = path.read_bytes()

    def check(data: st.DataObject) -> None:
        content = bytearray(whole)
        match data.draw(st.sampled_from(["random", "cut", "bytes", "bytes", "spliced"])):
            case "random":
                content = data.draw(st.binary(max_size=200))
            case "cut":
                content = content[: data.draw(st.integers(0, len(whole)))]
            case "bytes":
                for _ in range(data.draw(st.integers(1, 5))):
                    content[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
            case "spliced":
                first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
                content[first:last] = data.draw(st.binary(max_size=40))
        path.write_bytes(content)
        try:
            read(path)
        except ValueError as error:
            assert str(error)

    fuzz(check, examples)
