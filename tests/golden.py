"""Hashes of what every method, compressor and fault computes, to prove that a change of the code changes no bit.

    python -m tests.golden write before.json [WORD ...]      plays everything, or the cases whose names hold a WORD
    python -m tests.golden compare before.json [WORD ...]    plays it again; exit code 1 where a hash differs

A run's hashes cover its records (all but wall time), its models, and every array that outlives its last round.
"""

import contextlib
import functools
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfl.determinism.process import prepare_process

prepare_process()

import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from rayfl.choices.kinds import named  # noqa: E402
from rayfl.experiment.experiment import Experiment  # noqa: E402
from rayfl.experiment.prepare import prepare  # noqa: E402
from rayfl.methods.base import Method, PeerHalf  # noqa: E402
from rayfl.metrics.fairness import RECORDED, is_summary  # noqa: E402
from rayfl.rounds.executor import InlineExecutor  # noqa: E402
from rayfl.run_directory.play_run import final_models  # noqa: E402
from rayfl.testing.executors import contents, play  # noqa: E402
from tests.contracts import every_method  # noqa: E402
from tests.contracts.every_compressor import VARIANTS, encode, label, ordinary  # noqa: E402

Hashes = dict[str, Any]

FAULTS: Mapping[str, Mapping[str, Any]] = {
    "dropout before download": {"dropout_before_download": 0.4},
    "dropout after download": {"dropout_after_download": 0.4},
    "dropout after training": {"dropout_after_training": 0.4},
    "upload loss": {"upload_loss": 0.4},
    "all losses": {
        "dropout_before_download": 0.2,
        "dropout_after_download": 0.2,
        "dropout_after_training": 0.2,
        "upload_loss": 0.2,
    },
    "deadline": {"deadline_s": 0.5, "examples_per_s": {"median": 500.0, "sigma": 1.0}},
    "take first": {"take_first": 3, "examples_per_s": {"median": 500.0, "sigma": 1.0}},
    "take first, losses": {"take_first": 3, "upload_loss": 0.3, "dropout_after_training": 0.3},
    "capacity": {"work": "capacity", "examples_per_s": {"median": 500.0, "sigma": 1.0}},
    "some a round": {"per_round": 3},
    "availability": {"per_round": 3, "availability": {"probability": 0.6}},
    "retention": {"retention_ratio": [0.2, 0.5, 1.0]},
    "unseen": {"unseen": 0.3},
}
SPEEDS: Mapping[str, Any] = {"examples_per_s": {"median": 20.0, "sigma": 1.0}, "downlink_mbps": 0.01, "count": 6}
SCHEDULES: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    "buffered fedpse": ("fedpse", {"name": "buffered", "buffer": 3}, {"per_round": 5}),
    "buffered fedopt": ("fedopt", {"name": "buffered", "buffer": 2}, {"availability": {"probability": 0.6}}),
    "asynchronous fedavg": ("fedavg", "asynchronous", {"dropout_before_download": 0.3}),
    "semi-synchronous ditto": ("ditto", "semi-synchronous", {"upload_loss": 0.2, "deadline_s": 60.0}),
    "gossip dpsgd": ("dpsgd", {"name": "gossip", "latency_s": 0.05}, {"availability": {"probability": 0.7}}),
    "gossip dispfl": ("dispfl", "gossip", {}),
    "gossip adpsgd": ("adpsgd", {"name": "gossip", "partners": 1}, {"dropout_after_training": 0.2}),
}
"""Schedules other than rounds: method, schedule, settings of the clients."""
SERVERS = ("fedavg", "scaffold", "fedpse", "fedstc")
PEERS = ("dpsgd", "dispfl", "mcepl")
SERVER_ONLY = (
    *("dropout after download", "upload loss", "all losses", "deadline", "take first", "take first, losses", "unseen"),
)
ON_RAY = (
    *("fedavg", "fedopt", "scaffold", "fedpse", "fedstc", "diana", "marina", "lag"),
    *("dpsgd", "dispfl", "mcepl", "par_weipru", "ind_mask"),
)


ending = contextlib.ExitStack()
"""What is done when this process has played everything."""


# Any: an experiment's tables.
def experiment(name: str, **options: Any) -> Experiment:
    """The experiment of the contracts, with the method's own batch size."""
    method = {"name": name, **every_method.own(name, options.get("clients", {}))}
    return every_method.experiment(name, **{"method": method, **options})


def digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


def of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Names, types, shapes and bytes of arrays."""
    return digest(
        *(repr((k, str(v.dtype), v.shape)).encode() + np.ascontiguousarray(v).tobytes() for k, v in arrays.items())
    )


def exactly(value: object) -> str:
    return value.hex() if isinstance(value, float) else repr(value)


def rows_digest(rows: Iterator[Mapping[str, object]]) -> str:
    return digest(
        *(";".join(f"{key}={exactly(value)}" for key, value in row.items() if key != "wall_s").encode() for row in rows)
    )


def inline(made: Experiment) -> Hashes:
    """Play in this process."""
    setup = prepare(made)
    executor = InlineExecutor(setup)
    records, run_states = play(setup, executor)
    rows: list[Mapping[str, object]] = []
    for record in records:
        # They follow from the clients' values, and records of earlier versions lack them.
        metrics = [row for row in record.metrics if not is_summary(row.name, RECORDED)]
        rows += [vars(record.row), *(row._asdict() for row in (*record.clients, *metrics))]
    models = {
        f"{name}/{key}": tensor.numpy()
        for name, parts in final_models(setup, executor, run_states[-1]).items()
        for part in parts
        for key, tensor in part.items()
    }
    kept = sorted(of_arrays({"": array}) for array in contents(executor, run_states[-1]).values())
    return {
        "records": rows_digest(iter(rows)),
        "models": of_arrays(models),
        "memory": digest(*(one.encode() for one in kept)),
        "uplink_bits": sum(record.row.uplink_bits for record in records),
        "downlink_bits": sum(record.row.downlink_bits for record in records),
        "means": {
            name: value
            for name, value in records[-1].means.items()
            if name.endswith("accuracy") and not is_summary(name, RECORDED)
        },
    }


def on_ray(made: Experiment) -> Hashes:
    """Play on two Ray actors, into a run directory, and read that."""
    from safetensors.numpy import load_file

    from jobs.single import run

    _start_ray()
    with tempfile.TemporaryDirectory() as folder:
        place = run(made, Path(folder) / "run")
        tables = sorted(place.glob("records/*.parquet"))
        assert tables, f"{place} has no records"
        rows = [row for table in tables for row in pq.read_table(table).to_pylist()]
        rows = [row for row in rows if not is_summary(row.get("name", ""), RECORDED)]
        models = {
            f"{file.stem}/{key}": array
            for file in sorted(place.rglob("models/*.safetensors"))
            for key, array in sorted(load_file(file).items())
        }
    return {"records": rows_digest(iter(rows)), "models": of_arrays(models)}


@functools.cache
def _start_ray() -> None:
    """A local Ray of two cores, which ends with this process."""
    import ray

    from actors import session

    ending.enter_context(session.private())
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    ending.callback(ray.shutdown)


def one_compressor(compressor: Any) -> Hashes:
    packet, memory = encode(compressor, ordinary())
    decoded = {name: tensor.numpy() for name, tensor in packet.decode().items()}
    return {
        "parts": of_arrays(packet.parts),
        "decoded": of_arrays(decoded),
        "memory": of_arrays({name: tensor.numpy() for name, tensor in memory.items()}),
        "bits": packet.num_bits,
    }


def cases() -> Iterator[tuple[str, Callable[[], Hashes]]]:
    for compressor in VARIANTS:
        yield f"encode {label(compressor)}", lambda compressor=compressor: one_compressor(compressor)
    for name, kind in named(Method).items():
        for engine in ("loop", "vmap"):
            yield f"{engine} {name}", lambda name=name, engine=engine: inline(with_runtime(name, engine=engine))
        if not kind.capabilities.own_compression:
            top = {"name": "topk", "keep_ratio": 0.2}
            everyone = issubclass(kind, PeerHalf) or kind.capabilities.needs_everyone
            clients = {"count": 6, **({} if everyone else {"per_round": 4})}
            yield (
                f"topk {name}",
                lambda name=name, top=top, clients=clients: inline(
                    experiment(name, uplink=top, runtime={"engine": "loop"}, clients=clients)
                ),
            )
    for compressor in VARIANTS:
        if compressor.name != "dense":
            table = _table(compressor)
            yield (
                f"fedavg by {label(compressor)}",
                lambda table=table: inline(experiment("fedavg", uplink=table, rounds=2)),
            )
    for name in ("fedavg", "scaffold", "fedopt"):
        yield (
            f"elastic {name}",
            lambda name=name: inline(experiment(name, method={"name": name}, wrap="elastic")),
        )
    for name in (*SERVERS, *PEERS):
        for fault, clients in FAULTS.items():
            if name in PEERS and (fault in SERVER_ONLY or "per_round" in clients):
                continue
            yield (
                f"fault {name}: {fault}",
                lambda name=name, clients=clients: inline(experiment(name, rounds=4, clients={"count": 6, **clients})),
            )
    for title, (name, schedule, clients) in SCHEDULES.items():
        made = functools.partial(experiment, name, schedule=schedule, clients={**SPEEDS, **clients}, rounds=6)
        yield f"schedule {title}", lambda made=made: inline(made())
    for name in ON_RAY:
        yield (
            f"ray {name}",
            lambda name=name: on_ray(
                experiment(
                    name,
                    runtime={"executor": "ray", "actors": 2},
                    output={"report": False},
                    clients={"count": 20, "dropout_after_training": 0.2},
                )
            ),
        )


# Any: a table of the runtime.
def with_runtime(name: str, **runtime: Any) -> Experiment:
    return experiment(name, runtime=runtime)


def _table(compressor: Any) -> dict[str, Any]:
    found = experiment("fedavg", uplink=compressor)
    return found.as_dict()["uplink"]


def main(command: str, file: Path, words: list[str]) -> int:
    known: dict[str, Hashes] = json.loads(file.read_text()) if command == "compare" else {}
    found: dict[str, Hashes] = {}
    different = []
    for name, make in cases():
        if words and not any(word in name for word in words):
            continue
        try:
            found[name] = json.loads(json.dumps(make()))
        except ValueError as error:
            found[name] = {"refused": str(error)}
        if command == "compare" and found[name] != known.get(name):
            different.append(name)
            print(f"DIFFERENT {name}\n  {known.get(name)}\n  {found[name]}", flush=True)
    if command == "write":
        file.write_text(json.dumps(found, indent=1))
    gone = [name for name in known if name not in found and (not words or any(word in name for word in words))]
    print(f"{len(found)} runs, {len(different)} different, {len(gone)} gone")
    return bool(different or gone)


if __name__ == "__main__":
    with ending:
        sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
