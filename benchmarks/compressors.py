"""The benchmark `compressors`: the time, size and error of every compressor's packets for one large made-up update.

Times are processor time on one thread, the best of a few repeats, which is steadier than the clock on a shared machine.
A memory copy and np.partition of the same numbers are measured too, to compare with.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vl_convert
from rich.table import Table

from benchmarks.figures import Column, Figures, Results
from jobs.display import print_table
from rayfl import tree
from rayfl.choices import kinds
from rayfl.compress.base import Compressor, Packet
from rayfl.compress.masks import mask_packet
from rayfl.compress.sign import votes_packet
from rayfl.compress.sparse import sparse_packet, top_k_support
from rayfl.determinism.process import prepare_process
from rayfl.determinism.torch_flags import fixed
from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.run_directory.run_files import OutputKind, require_replaceable, write_output
from rayfl.tree import Tree

MARK = 'data-written-by="python -m benchmarks compressors"'
PLOT = OutputKind("a plot of compressors", MARK.encode())
"""Plots that this benchmark wrote have the mark, and may be replaced."""
REPEATS = 3
FEWEST_ENTRIES = 100
PARTITIONED = 0.1
"""The share of entries that the reference np.partition puts at the end."""

# Any: tables as an experiment file has them.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"name": "dense"},
    "fp16": {"name": "dense", "dtype": "fp16"},
    "bf16": {"name": "dense", "dtype": "bf16"},
    "topk 10 %": {"name": "topk", "keep_ratio": 0.1},
    "topk 10 % model": {"name": "topk", "keep_ratio": 0.1, "scope": "model"},
    "topk 10 % fp16": {"name": "topk", "keep_ratio": 0.1, "values": "fp16"},
    "topk 1 %": {"name": "topk", "keep_ratio": 0.01},
    "randk 10 %": {"name": "randk", "keep_ratio": 0.1},
    "randk 10 % biased": {"name": "randk", "keep_ratio": 0.1, "scale": False},
    "randk 1 % biased": {"name": "randk", "keep_ratio": 0.01, "scale": False},
    "threshold 0.03": {"name": "threshold", "threshold": 0.03},
    "bernoulli 0.9": {"name": "bernoulli", "probability": 0.9},
    "quantize s=1": {"name": "quantize", "norm": "inf", "levels": 1},
    "quantize s=7": {"name": "quantize", "norm": "inf", "levels": 7},
    "quantize s=127": {"name": "quantize", "norm": "inf", "levels": 127},
    "quantize s=2047": {"name": "quantize", "norm": "inf", "levels": 2047},
    "quantize s=7 elias": {"name": "quantize", "norm": "inf", "levels": 7, "coding": "elias"},
    "qsgd s=1": {"name": "qsgd", "levels": 1},
    "qsgd s=1 elias": {"name": "qsgd", "levels": 1, "coding": "elias"},
    "qsgd s=7": {"name": "qsgd", "levels": 7},
    "qsgd s=7 elias": {"name": "qsgd", "levels": 7, "coding": "elias"},
    "qsgd s=127": {"name": "qsgd", "levels": 127},
    "terngrad": {"name": "terngrad"},
    "terngrad clip 2.5": {"name": "terngrad", "clip": 2.5},
    "natural": {"name": "natural"},
    "sign": {"name": "sign"},
    "onebit": {"name": "onebit"},
    "stc 10 %": {"name": "stc", "keep_ratio": 0.1},
    "stc 1 %": {"name": "stc", "keep_ratio": 0.01},
    "structured 0.3": {"name": "structured", "threshold": 0.3},
    "structured 10 %": {"name": "structured", "keep_ratio": 0.1},
    "topk 10 % + qsgd": {"name": "compose"},
    "topk 1 % + natural": {
        "name": "compose",
        "outer": {"name": "topk", "keep_ratio": 0.01},
        "inner": {"name": "natural"},
    },
    "randk 10 % + sign": {
        "name": "compose",
        "outer": {"name": "randk", "keep_ratio": 0.1, "scale": False},
        "inner": {"name": "sign"},
    },
    "feedback (topk)": {"name": "feedback"},
    "powersgd r=2": {"name": "powersgd", "rank": 2},
    "eden 1 bit": {"name": "eden", "bits": 1},
    "eden 1 bit least": {"name": "eden", "bits": 1, "scale": "least"},
    "eden 4 bits": {"name": "eden", "bits": 4},
    "lossless (fp32)": {"name": "lossless", "inner": {"name": "dense"}},
    "lossless (qsgd)": {"name": "lossless", "inner": {"name": "qsgd"}},
}
"""The measured settings by their label in the table; compressors that are not here are measured with their defaults.

"quantize" has the inf norm and s levels; a bucket has 512 entries; without "elias" each entry has a fixed width.
"""


@dataclass(frozen=True)
class Measured:
    """One row: seconds on one thread, the packet's size, and ||C(v) - v||^2 / ||v||^2; None if C(v) is no copy of v."""

    label: str
    kind: str
    encode_s: float
    decode_s: float
    num_bits: int
    error: float | None


@dataclass(frozen=True)
class References:
    """Seconds on one thread for the same numbers: a copy between two arrays, and np.partition."""

    copy_s: float
    partition_s: float


def bench_compressors(num_entries: int, plot: Path, results: Results) -> None:
    """Measure everything on `num_entries` numbers, print the table, and write the plot and `results`.

    Raise RayflError, before anything is measured, for arguments that are not allowed, and if a file cannot be written.
    """
    if num_entries < FEWEST_ENTRIES:
        raise RayflError(f"--entries {num_entries} is too few to divide into tensors; give {FEWEST_ENTRIES} or more")
    if plot.suffix != ".svg":
        raise RayflError(f"--plot {plot} ends in {plot.suffix!r}; write a name that ends in .svg")
    if not plot.parent.is_dir():
        raise RayflError(f"--plot {plot}: there is no directory {plot.parent}; make it, or name another place")
    require_replaceable(plot, PLOT, results.overwrite)
    results.require()
    # The numbers, their packet, and the decoded numbers.
    memory.require(12 * num_entries, f"--entries {num_entries}", "give fewer")
    prepare_process()
    x = update(num_entries)
    begun = time.perf_counter(), time.process_time()
    with fixed(1, torch.device("cpu")):
        references = measure_references(x)
        rows = [*measure_compressors(x), *measure_packets(x)]
    clock = (time.perf_counter() - begun[0]) / (time.process_time() - begun[1])
    print_table(table(rows, references, num_entries))
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in x.items())
    print(f"Milliseconds of processor time on one thread, best of {REPEATS}. MB/s: fp32 input by encode and decode")
    print(
        "together; copies: the same time in memory copies. Ratio: fp32 to the packet. Error: ||C(v) - v||^2 / ||v||^2"
    )
    print(f"of one draw. Input: {shapes};")
    print("0.01 times normal numbers times exp(N(0, 1) / 2) of their row and of their column, seed 0.")
    print(f"By the clock all of it took {clock:.1f} times its processor time: 1.0 on a machine that is otherwise idle.")
    drawn = [row for row in rows if row.error and row.num_bits >= num_entries / 1000]
    write_output(plot, picture(drawn, num_entries).encode(), PLOT, results.overwrite)
    print(f"plot: {plot}")
    left_out = [row.label for row in rows if row.error is not None and row not in drawn]
    if left_out:
        print(f"Not in it, for want of error or bits: {', '.join(left_out)}")
    columns = [Column(each.name) for each in fields(Measured)]
    figures = Figures("compressors", columns, rows=[asdict(row) for row in rows])
    results.write(figures, entries=num_entries, references=asdict(references), clock_to_processor_time=clock)


def update(num_entries: int) -> Tree:
    """A convolution (a fifth of the entries), a linear layer and its bias: normal numbers with heavy tails.

    Each row and column has its own scale, as filters and inputs have; the kurtosis of a matrix is 3 exp(2) = 22.
    """
    generator = np.random.default_rng(0)
    channels = math.isqrt(num_entries // (5 * 9))
    width = math.isqrt(num_entries - 9 * channels**2)
    shapes = {
        "conv.weight": (channels, channels, 3, 3),
        "fc.weight": (width, width),
        "fc.bias": (num_entries - 9 * channels**2 - width**2,),
    }
    x = {}
    for name, shape in shapes.items():
        numbers = generator.standard_normal(shape, np.float32)
        for axis in range(min(2, len(shape))):
            scales = np.exp(generator.standard_normal(shape[axis], np.float32) / 2)
            numbers *= scales.reshape(-1, *[1] * (len(shape) - axis - 1))
        x[name] = torch.from_numpy(numbers).mul_(0.01)
    return x


def compressors() -> dict[str, Compressor]:
    """The compressors to measure, by label: `SETTINGS`, and all others of the registry with their defaults."""
    known = kinds.named(Compressor)
    listed = {table["name"] for table in SETTINGS.values()}
    tables = {**SETTINGS, **{name: {"name": name} for name in known if name not in listed}}
    return {label: kinds.make(Compressor, table) for label, table in tables.items()}


def measure_compressors(x: Tree) -> Iterator[Measured]:
    """A row for every compressor and its settings."""
    for label, compressor in compressors().items():
        memory = compressor.init(x)
        yield measure(label, compressor.name, x, _encoding(compressor, x, memory))


def _encoding(compressor: Compressor, x: Tree, memory: Tree) -> Callable[[], Packet]:
    return lambda: compressor.encode(x, memory, np.random.default_rng(0))[0]


def measure_packets(x: Tree) -> Iterator[Measured]:
    """A row for each packet that methods send without a compressor: a mask, entries under a mask, signs as votes."""
    mask = top_k_support(x, 0.5)
    yield measure("(bit mask)", "packet", mask, lambda: mask_packet(mask), compared=False)
    yield measure("(under a 50 % mask)", "packet", x, lambda: sparse_packet(x, mask))
    yield measure("(votes)", "packet", x, lambda: votes_packet(x), compared=False)


def measure(label: str, kind: str, x: Tree, encode: Callable[[], Packet], compared: bool = True) -> Measured:
    """Encode and decode `x` a few times; return a row."""
    encode_s, packet = timed(encode)
    decode_s, decoded = timed(packet.decode)
    return Measured(label, kind, encode_s, decode_s, packet.num_bits, relative_error(decoded, x) if compared else None)


def measure_references(x: Tree) -> References:
    """Measure a memory copy and np.partition."""
    numbers = tree.vector(x).numpy()
    other = np.zeros_like(numbers)
    kth = numbers.size - math.ceil(PARTITIONED * numbers.size)
    return References(timed(lambda: np.copyto(other, numbers))[0], timed(lambda: np.partition(numbers, kth))[0])


# Any: a function of any type.
def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The fewest seconds of processor time over `REPEATS` calls, and the result of the last one."""
    fewest, result = math.inf, None
    for _ in range(REPEATS):
        # Free the memory for the next call, as in a run of many rounds.
        result = None
        begun = time.process_time()
        result = work()
        fewest = min(fewest, time.process_time() - begun)
    return fewest, result


def relative_error(decoded: Tree, x: Tree) -> float:
    """||decoded - x||^2 / ||x||^2 over all tensors; sums in float64, differences in float32."""
    lost = sum(float((decoded[name] - tensor).double().square_().sum()) for name, tensor in x.items())
    return lost / sum(float(tensor.double().square_().sum()) for tensor in x.values())


def table(rows: Sequence[Measured], references: References, num_entries: int) -> Table:
    """A table of all rows, with the references below them."""
    columns = ("encode ms", "decode ms", "MB/s", "copies", "bits/entry", "ratio", "error")
    result = Table("compressor", *columns, title=f"{num_entries:,} float32")
    result.columns[0].no_wrap = True
    for column in result.columns[1:]:
        column.justify = "right"
    for row in rows:
        seconds = row.encode_s + row.decode_s
        result.add_row(
            row.label,
            f"{1e3 * row.encode_s:.1f}",
            f"{1e3 * row.decode_s:.1f}",
            f"{4e-6 * num_entries / seconds:,.0f}" if seconds else "",
            f"{seconds / references.copy_s:.1f}" if references.copy_s else "",
            f"{row.num_bits / num_entries:.3f}",
            f"{32 * num_entries / row.num_bits:.2f}" if row.num_bits else "",
            "" if row.error is None else f"{row.error:.2e}",
        )
    result.add_section()
    result.add_row("a memory copy", f"{1e3 * references.copy_s:.1f}")
    result.add_row("np.partition", f"{1e3 * references.partition_s:.1f}")
    return result


def picture(rows: Sequence[Measured], num_entries: int) -> str:
    """Draw error against bits per entry as SVG; the settings of one compressor have one colour."""
    dots = [
        {"kind": row.kind, "label": row.label, "bits": row.num_bits / num_entries, "error": row.error or 0.0}
        for row in rows
    ]
    titles = {"bits": "Bits an entry (logarithmic)", "error": "Relative squared error (logarithmic)"}
    x, y = (
        {"field": name, "type": "quantitative", "title": title, "scale": {"type": "log", "nice": False, "padding": 60}}
        for name, title in titles.items()
    )
    spec = {
        "width": 1000,
        "height": 800,
        "background": "white",
        "data": {"values": dots},
        "encoding": {"x": x, "y": y, "color": {"field": "kind", "legend": None}},
        "layer": [
            {"mark": {"type": "text", "align": "left", "dx": 7}, "encoding": {"text": {"field": "label"}}},
            {"mark": {"type": "circle", "size": 90, "opacity": 1}},
        ],
    }
    svg = vl_convert.vegalite_to_svg(spec)
    return svg.replace("<svg ", f"<svg {MARK} ", 1)
