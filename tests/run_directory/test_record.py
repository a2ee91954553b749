import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import SCHEMAS, Recorder, read_run, read_tables
from rayfl.run_directory.run_folder import create_run_directory
from rayfl.run_directory.saved_models import load_model, save_model
from tests.refusals import mentions, refused


def described(path: Path) -> Path:
    directory = create_run_directory(path)
    Description({"method": {"name": "fedavg"}, "seed": 1}).write(directory, {"torch": "2.13.0"})
    return directory


def going_on(directory: Path, after_round: int) -> Recorder:
    return Recorder(directory, read_tables(directory), after_round + 1)


def record_round(recorder: Recorder, round: int) -> None:
    """Two clients, the second dropped; every value is a function of the round, so that any row can be derived."""
    clients = [
        ClientRow(0, "delivered", 80 + round, 160, 50, 4, 1.5),
        ClientRow(1, f"dropped_{round}", 0, 160, 0, 0, 0.25),
    ]
    metrics = [MetricRow(None, "pooled/accuracy", round / 10), MetricRow(0, f"own_{round}/accuracy", math.nan)]
    recorder.round(RoundRow(round, 2, 1, 80 + round, 320, 1.5, 0.125), clients, metrics)


def tables(directory: Path) -> dict[str, pa.Table]:
    run = read_run(directory)
    return {name: getattr(run, name) for name in SCHEMAS}


def record_files(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "records").iterdir())


def test_rows_are_read_while_running_and_after_the_end(tmp_path):
    directory = described(tmp_path / "run")
    recorder = Recorder(directory)
    for round in range(3):
        record_round(recorder, round)
    running = read_run(directory)
    assert not running.finished
    assert record_files(directory) == ["clients.arrows", "metrics.arrows", "rounds.arrows"]
    recorder.close()
    finished = read_run(directory)
    assert finished.finished
    assert record_files(directory) == ["clients.parquet", "metrics.parquet", "rounds.parquet"]
    for name, schema in SCHEMAS.items():
        assert getattr(running, name).schema == getattr(finished, name).schema == schema
    # NaN differs from itself, so tables with one are compared as text.
    assert str(running.metrics.to_pylist()) == str(finished.metrics.to_pylist())
    assert running.clients.equals(finished.clients)
    assert finished.rounds.to_pylist()[2] == {
        "round": 2,
        "selected": 2,
        "delivered": 1,
        "uplink_bits": 82,
        "downlink_bits": 320,
        "simulated_s": 1.5,
        "wall_s": 0.125,
    }
    assert finished.clients.to_pylist()[5] == {
        "round": 2,
        "client": 1,
        "status": "dropped_2",
        "uplink_bits": 0,
        "downlink_bits": 160,
        "num_samples": 0,
        "num_steps": 0,
        "simulated_s": 0.25,
    }
    assert finished.metrics.to_pylist()[4] == {"round": 2, "client": None, "name": "pooled/accuracy", "value": 0.2}
    assert math.isnan(finished.metrics["value"][5].as_py())
    assert finished.experiment == {"method": {"name": "fedavg"}, "seed": 1}
    assert finished.platform == {"torch": "2.13.0"}


def test_a_round_without_clients_or_metrics_is_a_round(tmp_path):
    directory = described(tmp_path / "run")
    with Recorder(directory) as recorder:
        recorder.round(RoundRow(0, 0, 0, 0, 0, 0.0, 0.0), [], [])
    run = read_run(directory)
    assert (len(run.rounds), len(run.clients), len(run.metrics)) == (1, 0, 0)


@pytest.mark.parametrize("kept", ["schema", "half a schema", "nothing"])
def test_a_stream_cut_at_its_beginning_is_an_empty_table(tmp_path, kept):
    directory = described(tmp_path / "run")
    recorder = Recorder(directory)
    stream = directory / "records" / "rounds.arrows"
    size = stream.stat().st_size
    record_round(recorder, 0)
    recorder.stop()
    os.truncate(stream, {"schema": size, "half a schema": size // 2, "nothing": 0}[kept])
    assert len(read_run(directory).rounds) == 0
    assert len(read_run(directory).clients) == 2


@pytest.mark.slow
def test_a_stream_cut_anywhere_loses_only_the_batch_that_was_cut(tmp_path):
    directory = described(tmp_path / "run")
    recorder = Recorder(directory)
    stream = directory / "records" / "clients.arrows"
    sizes = []
    for round in range(3):
        record_round(recorder, round)
        sizes.append(stream.stat().st_size)
    recorder.stop()
    whole = stream.read_bytes()
    for size in range(sizes[1], sizes[2]):
        stream.write_bytes(whole[:size])
        # Two rows a round; the third round's batch is not all there.
        assert read_run(directory).clients["status"].to_pylist() == ["delivered", "dropped_0", "delivered", "dropped_1"]
    stream.write_bytes(whole[: sizes[2]])
    assert len(read_run(directory).clients) == 6


def test_a_killed_writer_has_left_every_round_that_it_recorded(tmp_path):
    directory = described(tmp_path / "run")
    code = (
        "import os, signal, sys; from pathlib import Path; from rayfl.run_directory.record import Recorder\n"
        "from tests.run_directory.test_record import record_round\n"
        "recorder = Recorder(Path(sys.argv[1]))\n"
        "for round in range(5): record_round(recorder, round)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(directory)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    run = read_run(directory)
    assert (len(run.rounds), len(run.clients), len(run.metrics)) == (5, 10, 10)


@pytest.mark.parametrize("was", ["finished", "running", "torn"])
def test_a_resumed_run_leaves_the_same_files_as_one_that_never_stopped(tmp_path, was):
    through, stopped = described(tmp_path / "through"), described(tmp_path / "stopped")
    with Recorder(through) as recorder:
        for round in range(4):
            record_round(recorder, round)
    recorder = Recorder(stopped)
    for round in range(5):
        record_round(recorder, round)
    if was == "finished":
        recorder.close()
    else:
        recorder.stop()
    if was == "torn":
        stream = stopped / "records" / "metrics.arrows"
        os.truncate(stream, stream.stat().st_size - 100)
    with going_on(stopped, 2) as recorder:
        # Rounds 3 and 4 of the first attempt are gone before they are run again.
        assert read_run(stopped).rounds["round"].to_pylist() == [0, 1, 2]
        assert read_run(stopped).clients["round"].to_pylist() == [0, 0, 1, 1, 2, 2]
        assert read_run(stopped).metrics["round"].to_pylist() == [0, 0, 1, 1, 2, 2]
        # Round 4 is not run again: its words must not linger in the dictionaries either.
        record_round(recorder, 3)
    for name in SCHEMAS:
        files = [directory / "records" / f"{name}.parquet" for directory in (through, stopped)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert record_files(stopped) == record_files(through)


def test_resuming_from_the_start(tmp_path):
    directory = described(tmp_path / "run")
    recorder = Recorder(directory)
    record_round(recorder, 0)
    recorder.stop()
    with going_on(directory, -1) as recorder:
        assert [len(table) for table in tables(directory).values()] == [0, 0, 0]
        record_round(recorder, 0)
    assert len(read_run(directory).rounds) == 1


def test_an_exception_leaves_a_run_that_can_be_resumed(tmp_path):
    directory = described(tmp_path / "run")
    with pytest.raises(KeyError), Recorder(directory) as recorder:
        record_round(recorder, 0)
        raise KeyError
    assert not read_run(directory).finished
    with going_on(directory, 0) as recorder:
        record_round(recorder, 1)
    assert read_run(directory).rounds["round"].to_pylist() == [0, 1]


def test_a_cut_while_parquet_replaces_the_streams_loses_nothing(tmp_path):
    directory = described(tmp_path / "run")
    recorder = Recorder(directory)
    record_round(recorder, 0)
    recorder.stop()
    before = tables(directory)
    # As if killed after the first of three renames, with a partial file of the second.
    pq.write_table(before["rounds"], directory / "records" / "rounds.parquet")
    (directory / "records" / "clients.parquet.partial").write_bytes(b"PAR1 and no more")
    assert not read_run(directory).finished
    assert before["clients"].equals(tables(directory)["clients"])
    assert before["rounds"].equals(tables(directory)["rounds"])
    with going_on(directory, 0):
        pass
    assert read_run(directory).finished
    assert before["clients"].equals(tables(directory)["clients"])


def test_rounds_are_recorded_in_order(tmp_path):
    with Recorder(described(tmp_path / "run")) as recorder:
        record_round(recorder, 1)
        with pytest.raises(AssertionError) as raised:
            record_round(recorder, 1)
    assert mentions(str(raised.value), "round 1")


def test_records_of_an_earlier_run_are_not_appended_to(tmp_path):
    directory = described(tmp_path / "run")
    with Recorder(directory) as recorder:
        record_round(recorder, 0)
    with refused(names=[directory / "records", "resume"]):
        Recorder(directory)


@pytest.mark.parametrize("name", SCHEMAS)
def test_nobody_resumes_a_run_while_its_records_are_compacted(tmp_path, monkeypatch, name):
    directory = described(tmp_path / "run")
    late_paths, write_table = [], pq.write_table

    def late(table, path, **options):
        if path.name.startswith(name):
            with refused(names=[directory, "wait"]):
                going_on(directory, 0)
            late_paths.append(path)
        write_table(table, path, **options)

    monkeypatch.setattr(pq, "write_table", late)
    with Recorder(directory) as recorder:
        recorder.round(RoundRow(0, 1, 1, 8, 8, 1.0, 0.1), [], [])
    assert late_paths and read_run(directory).finished and len(read_run(directory).rounds) == 1


def test_models_come_back_bit_for_bit_even_when_they_share_memory(tmp_path):
    directory = described(tmp_path / "run")
    shared = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tree = {"a": shared, "b": shared.T, "c": torch.tensor([math.nan, 1.5], dtype=torch.float16, requires_grad=True)}
    [path] = save_model(directory, "client-7", [tree])
    assert path == directory / "models" / "client-7.safetensors"
    loaded = load_model(directory, "client-7")
    assert torch.equal(loaded["a"], shared)
    assert torch.equal(loaded["b"], shared.T)
    assert loaded["c"].view(torch.int16).tolist() == tree["c"].detach().view(torch.int16).tolist()
    with refused(names=[directory / "models" / "client-8.safetensors"]):
        load_model(directory, "client-8")


def test_nothing_in_a_run_directory_is_pickled_or_half_written(tmp_path):
    directory = described(tmp_path / "run")
    with Recorder(directory) as recorder:
        record_round(recorder, 0)
        recorder.sync()
    save_model(directory, "server", [{"w": torch.ones(2)}])
    files = {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for name, content in files.items():
        if name.endswith(".json"):
            json.loads(content)
        elif name.endswith(".parquet"):
            assert content[:4] == content[-4:] == b"PAR1"
        elif name.endswith(".safetensors"):
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        else:
            assert name in ("experiment.toml", "lock")
    assert len(files) == 3 + 3 + 1 + 1
