"""The commands `rayfl bench NAME`: what each measures, its options, and what became of older spellings.

A list of commands loads nothing that it does not need.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from jobs.command_line import EXISTING, refuse, sentences
from rayfl.errors import RayflError

if TYPE_CHECKING:
    from rayfl.determinism.process import Precision

_FORMER = ("compressors", "exchange", "chaos", "scale")
"""Benches that were options of `rayfl bench` before each had a command."""


class _Benches(click.Group):
    """The benches; what is none of them gets a sentence that says how it is written."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            refuse(ValueError(f"{shlex.quote(args[0])} is no bench; write: {_spelling(self.commands, args)}"))
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            spelling = _spelling(self.commands, given)
            refuse(ValueError(f"rayfl bench has no option {error.option_name}; write: {spelling}"))


def _spelling(benches: Iterable[str], args: Sequence[str]) -> str:
    """How the arguments of `rayfl bench`, which are no command, are written; they may be those of a former version."""
    for bench in _FORMER:
        if f"--{bench}" in args:
            return shlex.join(["rayfl", "bench", bench, *(word for word in args if word != f"--{bench}")])
    if args[0].startswith("W"):
        return shlex.join(["rayfl", "bench", "rounds", *args])
    return f"rayfl bench NAME, where NAME is one of {', '.join(_owners(args[0]) or benches)}"


class _Bench(click.Command):
    """A bench; an option or an argument that it does not have is refused in one sentence."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            name = f"rayfl bench {self.name}"
            refuse(ValueError(f"{name}: {_why(error)}; see {name} --help"))


def _why(error: click.UsageError) -> str:
    """What is wrong, and where the option belongs to other benches, to which."""
    if not isinstance(error, click.NoSuchOption):
        text = error.format_message().rstrip(".")
        return text[:1].lower() + text[1:]
    owners = " and ".join(_owners(error.option_name))
    return f"there is no option {error.option_name}" + (f", which is one of {owners}" if owners else "")


def _owners(option: str) -> list[str]:
    """The benches that have an option."""
    return [name for name, one in bench.commands.items() if any(option in each.opts for each in one.params)]


@click.group(cls=_Benches)
def bench() -> None:
    """Measure rayfl on this machine: each bench prints a table and writes its figures as JSON."""


def _measuring(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function the bench NAME, with the options that all benches have."""

    def decorated(function: Callable[..., None]) -> click.Command:
        overwriting = click.option("--overwrite", is_flag=True, help="Replace files that it did not write, too.")
        written = click.option(
            "--json",
            "results",
            type=EXISTING,
            default=f"bench-{name}.json",
            show_default=True,
            help="Where to write the figures as JSON.",
        )
        return bench.command(name, cls=_Bench)(written(overwriting(function)))

    return decorated


@_measuring("rounds")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--rounds", "count", type=int, help="Rounds that are measured, instead of the workload's own number.")
@click.option("--peers", is_flag=True, help="Run Flower, pfl-research and BlazeFL on the same work, too.")
@click.option("--peers-python", "pythons", multiple=True, metavar="PATH", help="The Python that has them; repeatable.")
def rounds(
    workloads: Sequence[str], count: int | None, peers: bool, pythons: Sequence[str], results: Path, overwrite: bool
) -> None:
    """Measure a round's time and memory beside a bare PyTorch loop: WORKLOADs W1, W2, W3, W1x10, by default all."""
    with sentences():
        from jobs.bench.figures import Results
        from jobs.bench.rounds import bench_rounds

        if pythons and not peers:
            raise RayflError("--peers-python says where other simulators are, which --peers runs: give --peers, too")
        others = (pythons or [sys.executable]) if peers else None
        bench_rounds(workloads, Results("rounds", results, overwrite), count, others)


@_measuring("compressors")
@click.option("--entries", type=int, default=11_000_000, show_default=True, help="Numbers that are compressed.")
@click.option("--plot", type=EXISTING, default="compressors.svg", show_default=True, help="The plot of error and bits.")
def compressors(entries: int, plot: Path, results: Path, overwrite: bool) -> None:
    """Measure every compressor: time, size and error of its packets."""
    with sentences():
        from jobs.bench.compressors import bench_compressors
        from jobs.bench.figures import Results

        bench_compressors(entries, plot, Results("compressors", results, overwrite))


@_measuring("exchange")
@click.option("--peers", type=int, default=100, show_default=True, help="Peers of the exchange.")
@click.option("--entries", type=int, default=11_000_000, show_default=True, help="Numbers in a peer's model.")
def exchange(peers: int, entries: int, results: Path, overwrite: bool) -> None:
    """Measure one exchange among peers without training: time, object store, memory."""
    with sentences():
        from jobs.bench.exchange import bench_exchange
        from jobs.bench.figures import Results

        bench_exchange(peers, entries, Results("exchange", results, overwrite))


@_measuring("chaos")
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option("--kills", type=int, default=100, show_default=True, help="Kills, at least.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of what is struck, and when.")
def chaos(methods: Sequence[str], kills: int, seed: int, results: Path, overwrite: bool) -> None:
    """Kill what can be killed in runs of METHODs (by default fedpse, fedavg, dispfl and scaffold); compare the bits."""
    with sentences():
        from jobs.bench.chaos import bench_chaos
        from jobs.bench.figures import Results

        sys.exit(bench_chaos(methods, kills, seed, Results("chaos", results, overwrite)))


@_measuring("scale")
@click.option("--nodes", type=int, help="Measure many small calls on so many simulated nodes instead.")
@click.option("--actors", type=int, multiple=True, help="Actors on the nodes; repeatable.  [default: 8 16 32 64]")
@click.option("--participants", type=int, help="Clients of each round on the nodes.  [default: 1000]")
def scale(nodes: int | None, actors: Sequence[int], participants: int | None, results: Path, overwrite: bool) -> None:
    """Measure runs of more and more clients, what their states cost, and states that spill to disk.

    With --nodes: rounds a second on a cluster of simulated nodes in this machine, and what the coordinator does.
    """
    with sentences():
        from jobs.bench.figures import Results

        written = Results("scale", results, overwrite)
        if nodes is None:
            if actors or participants is not None:
                raise RayflError("--actors and --participants are those of simulated nodes: give --nodes, too")
            from jobs.bench.scale import bench_scale

            sys.exit(bench_scale(written))
        from jobs.bench.nodes import ACTORS, PARTICIPANTS, bench_nodes

        bench_nodes(nodes, actors or ACTORS, PARTICIPANTS if participants is None else participants, written)


@_measuring("locality")
@click.option("--clients", default=200, show_default=True, help="Clients, of which all and then a quarter take part.")
@click.option("--nodes", default=4, show_default=True, help="Simulated nodes, with one core each.")
@click.option("--rounds", default=10, show_default=True, help="Rounds of each run.")
@click.option("--hidden", default=1000, show_default=True, help="Width of the model, which has 75 parameters for each.")
def locality(clients: int, nodes: int, rounds: int, hidden: int, results: Path, overwrite: bool) -> None:
    """Measure what a round moves between nodes, with calls sent to where states lie and to whoever is free."""
    with sentences():
        from jobs.bench.figures import Results
        from jobs.bench.locality import bench_locality

        bench_locality(clients, nodes, rounds, hidden, Results("locality", results, overwrite))


@_measuring("start")
@click.option("--repeats", type=int, default=3, show_default=True, help="How often each is measured.")
def start(repeats: int, results: Path, overwrite: bool) -> None:
    """Measure how long the first line, the first round and the prompt take, and lists and refusals."""
    with sentences():
        from jobs.bench.figures import Results
        from jobs.bench.start import bench_start

        bench_start(repeats, Results("start", results, overwrite))


@_measuring("gpu")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True, help="Where.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "tf32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Of a model's products and convolutions.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "loop", "vmap"]),
    default="auto",
    show_default=True,
    help="Of WORKLOADs: clients one by one or in stacks.",
)
@click.option("--rounds", type=int, help="Rounds that count; by default each workload's own number.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="Share of the workloads' examples.")
@click.option("--peers-python", metavar="PATH", help="Python of an environment with pfl-research: run that, too.")
def gpu(
    workloads: Sequence[str],
    device: str,
    precision: "Precision",
    engine: Literal["auto", "loop", "vmap"],
    rounds: int | None,
    scale: float,
    peers_python: str | None,
    results: Path,
    overwrite: bool,
) -> None:
    """Measure rayfl without Ray beside a bare loop on a GPU: WORKLOADs W1, W2, W3, R18, models, compressors.

    By default all. In one process, two and four: time, memory, utilisation, energy, and whether the bits are the same.
    On a CPU a look takes --device cpu --scale 0.01 --rounds 1 --engine vmap.
    """
    with sentences():
        from jobs.bench.figures import Results
        from jobs.bench.gpu import bench_gpu

        written = Results("gpu", results, overwrite)
        given = {"device": device, "precision": precision, "engine": engine, "rounds": rounds, "scale": scale}
        sys.exit(bench_gpu(workloads, written, **given, python=peers_python))
