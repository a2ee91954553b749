"""`python -m benchmarks compressors`: a row for every compressor with its packet's size and error, and the plot."""

import math
import re
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks import compressors as bench
from rayfl.choices import kinds
from rayfl.compress.base import Compressor, message_bits
from rayfl.compress.dense import Dense
from rayfl.compress.masks import mask_packet
from rayfl.compress.sparse import TopK, top_k_support
from tests.benchmarks.commands import benchmark
from tests.refusals import line_with

ENTRIES = 3000


def cells(output: str) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    rows = [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 8}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[dict[str, list[str]], str, Path]:
    plot = tmp_path_factory.mktemp("bench") / "plot.svg"
    written = ("--json", plot.with_suffix(".json"))
    threads = torch.get_num_threads()
    result = benchmark("compressors", "--entries", ENTRIES, "--plot", plot, *written)
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    return cells(result.output), result.output, plot


def test_every_registered_compressor_has_a_row(printed):
    rows, _, _ = printed
    measured = bench.compressors()
    assert {compressor.name for compressor in measured.values()} == set(kinds.named(Compressor))
    assert set(measured) | {"(bit mask)", "a memory copy", "np.partition"} <= set(rows)


def test_sizes_are_those_of_the_packets(printed):
    rows, _, _ = printed
    x = bench.update(ENTRIES)
    for label, compressor in bench.compressors().items():
        packet, _ = compressor.encode(x, compressor.init(x), np.random.default_rng(0))
        bits = message_bits({"": packet})
        assert rows[label][4:6] == [f"{bits / ENTRIES:.3f}", f"{32 * ENTRIES / bits:.2f}"], label
    # 3000 entries: 8 * 8 * 9, 49 * 49 and 23; a mask takes 72, 301 and 3 bytes.
    assert [tensor.numel() for tensor in x.values()] == [576, 2401, 23]
    mask = top_k_support(x, 0.5)
    assert mask_packet(mask).num_bits == 8 * (72 + 301 + 3)
    assert rows["(bit mask)"][4:] == [f"{8 * 376 / 3000:.3f}", f"{32 * 3000 / (8 * 376):.2f}", ""]


def test_errors_are_what_the_receiver_lacks(printed):
    rows, _, _ = printed
    assert rows["fp32"][6] == "0.00e+00"
    numbers = [tensor.flatten().double().numpy() for tensor in bench.update(ENTRIES).values()]
    # The k largest of each tensor stay, and all others are lost.
    lost = sum(np.sort(part**2)[: part.size - math.ceil(0.1 * part.size)].sum() for part in numbers)
    assert rows["topk 10 %"][6] == f"{lost / sum((part**2).sum() for part in numbers):.2e}"


def test_the_relative_error_is_squared_and_over_all_tensors():
    x = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert bench.relative_error({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([4.0])}, x) == (9 + 1) / 25


def test_the_plot_is_an_svg_with_a_dot_and_a_label_for_each_lossy_row(printed):
    rows, output, plot = printed
    assert f"plot: {plot}" in output
    line_with(output, ["bits", "fp32"])
    svg = ElementTree.parse(plot).getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg" and "viewBox" in svg.attrib
    texts = {"".join(text.itertext()) for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    drawn = {label for label, row in rows.items() if len(row) == 7 and row[6] not in ("", "error", "0.00e+00")}
    assert len(drawn) > 30 and drawn <= texts and "fp32" not in texts
    assert {"Bits an entry (logarithmic)", "Relative squared error (logarithmic)"} <= texts


def test_lower_errors_lie_lower_and_more_bits_further_right():
    rows = [bench.Measured("a", "a", 0, 0, 100, 1e-6), bench.Measured("b", "b", 0, 0, 1000, 1e-3)]
    rows.append(bench.Measured("c", "b", 0, 0, 10000, 1.0))
    svg = bench.picture(rows, 1000)
    places = [(float(x), float(y)) for x, y in re.findall(r'"translate\(([\d.]+),([\d.]+)\)" d="M4', svg)]
    a, b, c = places[-3:]
    # Equal factors, equal ways: 10 in bits and 1000 in error; svg counts downwards.
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.3) and b[0] - a[0] > 100
    assert a[1] - b[1] == pytest.approx(b[1] - c[1], abs=0.3) and a[1] - b[1] > 100


def test_a_compressor_without_settings_here_runs_by_default(monkeypatch):
    class Newcomer(Dense):
        name: ClassVar[str] = "newcomer"

    known = {**kinds.named(Compressor), "newcomer": Newcomer}
    monkeypatch.setattr(kinds, "named", lambda kind: known)
    assert bench.compressors()["newcomer"] == Newcomer()
    assert "newcomer" not in bench.SETTINGS and bench.compressors()["topk 1 %"] == TopK(keep_ratio=0.01)


def test_the_time_is_the_best_of_all_calls(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(bench.time, "process_time", lambda: next(clock))
    calls = iter("abc")
    assert bench.timed(lambda: next(calls)) == (2.0, "c")


@pytest.mark.parametrize("num_entries", [100, 101, 12345])
def test_the_input_has_as_many_entries_as_asked_for_and_does_not_change(num_entries):
    x, again = bench.update(num_entries), bench.update(num_entries)
    assert sum(tensor.numel() for tensor in x.values()) == num_entries
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, again[name]) for name, tensor in x.items())


def test_the_input_has_heavy_tails():
    x = bench.update(1_000_000)["fc.weight"].double()
    # Products of a normal number and two of exp(N / 2): the fourth moment over the squared second is 3 exp(2) = 22.2
    # in expectation; that of one draw of 894 rows and columns is lower, and a normal distribution has 3.
    assert 8 < float((x**4).mean() / (x**2).mean() ** 2) < 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--entries", 99], "100"),
        (["--plot", "plot.png"], ".svg"),
        (["--plot", "nowhere/plot.svg"], "nowhere"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = benchmark("compressors", *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
