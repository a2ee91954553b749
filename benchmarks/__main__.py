"""The command line `python -m benchmarks NAME`: each benchmark prints a table and writes its figures as JSON."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.figures import Results
from jobs.display import serve_any_reader
from jobs.failures import sentences
from rayfl.determinism.process import ArithmeticPrecision
from rayfl.errors import RayflError

FILE = click.Path(path_type=Path)

# Each command imports its own benchmark, because some set up the process before they load torch.


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Measure rayfl on this machine: each benchmark prints a table and writes its figures as JSON."""


def _benchmark(function: Callable[..., int | None]) -> click.Command:
    """Make a function a command with its name and the options that all benchmarks have.

    The function takes a `Results` and its own options, and returns the exit code.
    """
    name = function.__name__

    # Any: the options of the command.
    @functools.wraps(function)
    def command(path: Path, overwrite: bool, **options: Any) -> None:
        with sentences():
            code = function(Results(name, path, overwrite), **options)
        sys.exit(code)

    overwriting = click.option(
        "--overwrite", is_flag=True, help="Also replace files that this benchmark did not write."
    )
    written = click.option(
        "--json",
        "path",
        type=FILE,
        default=f"bench-{name}.json",
        show_default=True,
        help="Where to write the figures as JSON.",
    )
    return main.command(name)(written(overwriting(command)))


@_benchmark
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--rounds", "count", type=int, help="Number of measured rounds; by default the workload's own.")
@click.option("--peers", is_flag=True, help="Also run Flower, pfl-research and BlazeFL on the same work.")
@click.option(
    "--peers-python", "pythons", multiple=True, metavar="PATH", help="A Python that has some of the peers; repeatable."
)
def rounds(results: Results, workloads: Sequence[str], count: int | None, peers: bool, pythons: Sequence[str]) -> None:
    """Measure a round's time and memory beside a bare PyTorch loop.

    WORKLOADs are W1, W2, W3 and W1x10; by default all run.
    """
    from benchmarks.rounds import bench_rounds

    if pythons and not peers:
        raise RayflError("--peers-python names the Python of --peers: add --peers")
    bench_rounds(workloads, results, count, (pythons or [sys.executable]) if peers else None)


@_benchmark
@click.option("--entries", type=int, default=11_000_000, show_default=True, help="Numbers to compress.")
@click.option(
    "--plot",
    type=FILE,
    default="compressors.svg",
    show_default=True,
    help="Where to plot error against bits.",
)
def compressors(results: Results, entries: int, plot: Path) -> None:
    """Measure the time, size and error of every compressor's packets."""
    from benchmarks.compressors import bench_compressors

    bench_compressors(entries, plot, results)


@_benchmark
@click.option("--peers", type=int, default=100, show_default=True, help="Number of peers.")
@click.option("--entries", type=int, default=11_000_000, show_default=True, help="Numbers in a peer's model.")
def exchange(results: Results, peers: int, entries: int) -> None:
    """Measure the time, object store and memory of one exchange among peers, without training."""
    from benchmarks.exchange import bench_exchange

    bench_exchange(peers, entries, results)


@_benchmark
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option("--kills", type=int, default=100, show_default=True, help="The least number of kills.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the strikes' victims and moments.")
def chaos(results: Results, methods: Sequence[str], kills: int, seed: int) -> int:
    """Kill processes of running METHODs and compare the bits of the results with undisturbed runs.

    By default the METHODs are fedpse, fedavg, dispfl, scaffold, "buffered fedavg" and "buffered fedpse": a name may
    follow that of a schedule.
    """
    from benchmarks.chaos import bench_chaos

    return bench_chaos(methods, kills, seed, results)


@_benchmark
@click.option("--nodes", type=int, help="Measure small calls on this number of simulated nodes instead.")
@click.option("--actors", type=int, multiple=True, help="Actors on the nodes; repeatable.  [default: 8 16 32 64]")
@click.option("--clients", type=int, help="Measure this number of clients in one process without Ray instead.")
@click.option("--participants", type=int, help="Clients of each round.  [default: 1000 on nodes, 10000 without Ray]")
@click.option("--parameters", type=int, help="Measure the memory of each process with a model of this size instead.")
def scale(
    results: Results,
    nodes: int | None,
    actors: Sequence[int],
    clients: int | None,
    participants: int | None,
    parameters: int | None,
) -> int | None:
    """Measure runs of 100 to 10,000 clients, the cost of their states, and states that spill to disk.

    With --nodes: measure rounds per second on simulated nodes, and the coordinator's work. With --clients: measure the
    first round, further rounds and memory of many clients, and of as many peers as there are participants. With
    --parameters: measure the memory of each process with one large model.
    """
    if parameters is not None:
        if actors or not nodes is clients is participants is None:
            raise RayflError("--parameters measures one model: leave out the other options")
        from benchmarks.large_model import bench_large_model

        bench_large_model(parameters, results)
        return None
    if clients is not None:
        if nodes is not None or actors:
            raise RayflError("--clients measures one process: leave out --nodes and --actors")
        from benchmarks.many_clients import bench_many_clients

        bench_many_clients(clients, 10_000 if participants is None else participants, results)
        return None
    if nodes is None:
        if actors or participants is not None:
            raise RayflError("--actors and --participants belong to simulated nodes: add --nodes, or --clients")
        from benchmarks.scale import bench_scale

        return bench_scale(results)
    from benchmarks.nodes import ACTORS, PARTICIPANTS, bench_nodes

    return bench_nodes(nodes, actors or ACTORS, PARTICIPANTS if participants is None else participants, results)


@_benchmark
@click.option(
    "--clients", default=200, show_default=True, help="Number of clients; first all take part, then a quarter."
)
@click.option("--nodes", default=4, show_default=True, help="Simulated nodes of one core each.")
@click.option("--rounds", default=10, show_default=True, help="Rounds of each run.")
@click.option("--hidden", default=1000, show_default=True, help="Width of the model, with 75 parameters per unit.")
def locality(results: Results, clients: int, nodes: int, rounds: int, hidden: int) -> None:
    """Measure the bytes that a round moves between nodes, with calls sent to the states' node or to any free actor."""
    from benchmarks.locality import bench_locality

    bench_locality(clients, nodes, rounds, hidden, results)


@_benchmark
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option("--clients", type=click.IntRange(2), default=64, show_default=True, help="Clients of the stack.")
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True, help="Number of measured rounds.")
def outside(results: Results, methods: Sequence[str], clients: int, rounds: int) -> None:
    """Measure the processor time of a round outside its steps, for each client of one stack on the CPU."""
    from benchmarks.outside_steps import bench_outside

    bench_outside(methods, clients, rounds, results)


@_benchmark
@click.option("--repeats", type=int, default=3, show_default=True, help="Repetitions of each measurement.")
def start(results: Results, repeats: int) -> None:
    """Measure the seconds until the first line, the first round and the prompt, and those of lists and refusals."""
    from benchmarks.start import bench_start

    bench_start(repeats, results)


@_benchmark
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option("--limit", "limit_s", type=float, help="Begin no further method after this many seconds.")
def settings(results: Results, methods: Sequence[str], limit_s: float | None) -> int:
    """Give each METHOD, by default all, every setting: what changes, what is refused, and what does nothing.

    Methods that the JSON file has already are left out, so that the next call goes on. The exit code is 1 if a
    setting does nothing without a word.
    """
    from benchmarks.settings import bench_settings

    return bench_settings(methods, results, limit_s)


@_benchmark
@click.option(
    "--seeds",
    default="1-20",
    show_default=True,
    help="A range, a seed, or a name that was printed, as 17.3f; or several.",
)
@click.option("--ray", "on_ray", is_flag=True, help="Play on 1 to 3 client actors and kill processes, on a Ray.")
@click.option("--file", type=FILE, help="Play the experiment in this TOML file instead.")
@click.option("--generator", "version", type=int, help="Version of the generator.  [default: the newest]")
@click.option("--limit", "limit_s", type=float, help="Begin no further experiment after this many seconds.")
@click.option("--alone", is_flag=True, help="Leave out the play in another process.")
def fuzz(
    results: Results,
    seeds: str,
    on_ray: bool,
    file: Path | None,
    version: int | None,
    limit_s: float | None,
    alone: bool,
) -> int:
    """Play random experiments in many ways, which must all give the same bits.

    A seed makes the same experiment for ever. Each is played calmly; stopped and resumed after every round; killed
    during rounds and resumed; with other evaluation.every and checkpoint.every; on 2 and 3 workers; and in another
    process. With --ray: on client actors, of which some are killed, and the coordinator with them. At the first
    difference of an experiment its command, a smaller TOML file and what differs are printed; the exit code is then 1.
    """
    from benchmarks.fuzz import bench_fuzz

    return bench_fuzz(seeds, results, version=version, on_ray=on_ray, file=file, limit_s=limit_s, alone=alone)


@_benchmark
@click.argument("versions", nargs=-1, metavar="VERSION...")
def ray_versions(results: Results, versions: Sequence[str]) -> int:
    """Try rayfl with other VERSIONs of Ray, each in a virtual environment, and print a Markdown table."""
    from benchmarks.ray_versions import bench_ray_versions

    return bench_ray_versions(versions, results)


@_benchmark
@click.argument("names", nargs=-1, metavar="[lowest] [pinned]")
def versions(results: Results, names: Sequence[str]) -> int:
    """Try rayfl with the lowest versions that it allows and the pinned ones, and print a Markdown table."""
    from benchmarks.versions import bench_versions

    return bench_versions(names, results)


@_benchmark
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True, help="The device."
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Precision of a model's products and convolutions.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "loop", "vmap"]),
    default="auto",
    show_default=True,
    help="Engine of W1 to R18: clients one by one or in stacks.",
)
@click.option("--rounds", type=int, help="Number of measured rounds; by default the workload's own.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Share of the workloads' examples.")
@click.option("--peers-python", metavar="PATH", help="Run pfl-research with this Python; default: this one.")
@click.option("--limit", "limit_s", type=float, default=60.0, show_default=True, help="Seconds for a row.")
def gpu(
    results: Results,
    workloads: Sequence[str],
    device: str,
    precision: ArithmeticPrecision,
    engine: Literal["auto", "loop", "vmap"],
    rounds: int | None,
    scale: float,
    peers_python: str | None,
    limit_s: float,
) -> int:
    """Measure rayfl without Ray beside a bare loop on a GPU.

    WORKLOADs are W1, W2, W3, R18, and names of models and compressors; by default all run. W1 to R18 run in one
    process, in two and in four. Measured are time, memory, utilisation, energy, and whether the bits are the same. To
    try it on a CPU: --device cpu --scale 0.01 --rounds 1 --engine vmap.
    """
    from benchmarks.gpu import bench_gpu

    given = {"device": device, "precision": precision, "engine": engine, "rounds": rounds, "scale": scale}
    return bench_gpu(workloads, results, **given, python=peers_python, limit_s=limit_s)


@_benchmark
@click.argument("groups", nargs=-1, metavar="[GROUP]...")
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True, help="The device."
)
@click.option("--rounds", type=int, help="Number of measured rounds; by default each group's own.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Share of the workloads' examples.")
@click.option("--peers-python", "python", metavar="PATH", help="Run pfl-research with this Python; default: this one.")
@click.option("--root", metavar="FOLDER", help="Folder of Fashion-MNIST's four files; default: Debian's package.")
@click.option("--limit", "limit_s", type=float, default=60.0, show_default=True, help="Seconds for a row.")
@click.option("--budget", "budget_s", type=float, default=570.0, show_default=True, help="Seconds for all rows.")
def graphs(
    results: Results,
    groups: Sequence[str],
    device: str,
    rounds: int | None,
    scale: float,
    python: str | None,
    root: str | None,
    limit_s: float,
    budget_s: float,
) -> int:
    """Prove CUDA graphs and a server on the GPU on one card, within ten minutes.

    GROUPs are methods (the bits of every method with and without graphs), W1, W2, W3, R18, ray, fashion, models, codecs
    and peer (pfl-research); by default all run, the most important first. Run it again with the same --json to measure
    what was left out. To try it on a CPU: --device cpu --scale 0.01 --rounds 1.
    """
    from benchmarks.graphs import bench_graphs

    given = {"device": device, "rounds": rounds, "scale": scale, "root": root, "python": python}
    return bench_graphs(groups, results, **given, limit_s=limit_s, budget_s=budget_s)


if __name__ == "__main__":
    serve_any_reader()
    main(prog_name="python -m benchmarks")
