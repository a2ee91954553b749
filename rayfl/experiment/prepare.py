"""From an experiment to its setup: load the data, deal it out, build the model and the method, check that they fit."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rayfl import tree
from rayfl.choices import plugins
from rayfl.data.batches import Batch
from rayfl.data.check import checked_dataset
from rayfl.data.datasets import Dataset
from rayfl.data.partition import Partition
from rayfl.determinism import seeding, torch_flags
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import digest
from rayfl.experiment.input_files import KeptFiles, kept_files
from rayfl.limits import memory
from rayfl.methods.base import Method
from rayfl.models import given_weights
from rayfl.population.sampling import Population
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.errors import HookError, error_text, out_of_memory
from rayfl.rounds.setup import Setup
from rayfl.run_directory.trackers.tracker import require_installed
from rayfl.settings import shown
from rayfl.task import Classification, Task
from rayfl.tree import Tree


def prepare(experiment: Experiment, files: KeptFiles | None = None) -> Setup:
    """The setup, which is the same in all rounds. files: the files that the experiment names; None: read them.

    Raise RayflError if parts of the experiment do not fit each other.
    """
    require_installed(experiment.output.track)
    torch_flags.choose(experiment.runtime.instruction_set)
    with _naming(experiment.data, "load"):
        dataset = checked_dataset(experiment.data.load())
    task = make_task(experiment, dataset)
    with _naming(experiment.method.kind, "__init__"):
        chosen = experiment.method.make(task, experiment.rounds)
    check_inputs(task, experiment.model.name, dataset)
    partition = make_partition(experiment, dataset)
    initial = initial_params(experiment, task, chosen)
    check_outputs(task, experiment.model.name, dataset, initial)
    runtime, topology = experiment.runtime, None
    if experiment.topology is not None:
        with _naming(experiment.topology, "read"):
            topology = experiment.topology.read(experiment.clients.count)
    setup = Setup(
        seed=experiment.seed,
        rounds=experiment.rounds,
        method=chosen,
        dataset=dataset,
        partition=partition,
        population=Population(experiment.clients, experiment.seed, partition.train.sizes),
        initial_arrays=tree.to_arrays(initial),
        uplink=experiment.uplink,
        downlink=experiment.downlink,
        topology=topology,
        evaluation=experiment.evaluation,
        engine_name=runtime.engine,
        stack_width=runtime.stack_width,
        device_name=runtime.device_name,
        threads=runtime.threads,
        precision=runtime.precision,
        identity=identity(experiment, files or kept_files(experiment.as_dict())),
    )
    check(setup, experiment)
    return setup


@contextmanager
def _naming(chosen: object, hook: str) -> Iterator[None]:
    """Turn an unexpected error in `hook` of what the experiment chose into one that names its class and file."""
    try:
        yield
    except (RayflError, HookError, OSError):
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        kind = chosen if isinstance(chosen, type) else type(chosen)
        raise HookError(f"{kind.__qualname__}.{hook} ({plugins.place_of(kind)}): {error_text(error)}") from error


def initial_params(experiment: Experiment, task: Task, method: Method) -> Tree:
    """The parameters of round 0, from `model.start` if it is given. Raise RayflError if they do not fit."""
    model = experiment.model
    params = task.init(seeding.torch_seed(experiment.seed, purpose="initial parameters"))
    if model.start is not None:
        params = given_weights.read(Path(model.start), params, model.name)
    initial = checked_hook(method.init_params)(params, seeding.FirstDraws(experiment.seed, seeding.NOBODY))
    if model.start is not None and any(initial[name] is not params[name] for name in params):
        raise RayflError(f"method {experiment.method.name!r} draws weights of its own here; remove model.start")
    return initial


def identity(experiment: Experiment, files: KeptFiles) -> str:
    """A digest of everything that decides the numbers of the rounds."""
    chosen, rounds = experiment.method, experiment.rounds
    length = rounds if chosen.kind.depends_on_num_rounds else None
    return digest(files.table, length, chosen.hyper.for_num_rounds(rounds))


def make_task(experiment: Experiment, dataset: Dataset) -> Classification:
    """The model on the data's samples. Raise RayflError if this machine has no memory for it and its gradient."""
    model = experiment.model
    options = ", ".join(f"model.{key}={shown(value)}" for key, value in model if isinstance(value, int | tuple))
    what = f"model {model.name!r} ({options})" if options else f"model {model.name!r}"
    # The module has no storage here, and torch counts its entries in 64 bits.
    try:
        build = model.builder(dataset.input_shape, dataset.num_classes)
        task = Classification(build, dataset.input_shape, model.memory_format, experiment.runtime.precision)
    except (RuntimeError, OverflowError, TypeError):
        if not options:
            raise
        raise RayflError(f"{what} has more entries than torch can count; make it smaller") from None
    entries = sum(math.prod(parameter.shape) for parameter in task.module.parameters())
    memory.require(2 * 4 * entries, f"{what} with its gradient", "make it smaller")
    return task


def check_inputs(task: Classification, model: str, dataset: Dataset) -> None:
    """Raise RayflError if the data are tokens and the model does not embed all of them, or if only the model has
    tokens.
    """
    embedded = [
        layer.num_embeddings for layer in task.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    if dataset.kind == "text" and not embedded:
        # Whole numbers in somebody's file are taken for tokens.
        cure = ", or give data.kind='vector' if these are numbers" if dataset.name == "arrays" else ""
        raise RayflError(
            f"model {model!r} takes numbers, and dataset {dataset.name!r} is tokens; choose a text model, for example "
            f"char-lstm or mean-embedding{cure}"
        )
    if dataset.kind != "text" and embedded:
        raise RayflError(f"model {model!r} takes tokens, and dataset {dataset.name!r} is not text; choose another")
    if embedded and min(embedded) < dataset.num_tokens:
        raise RayflError(
            f"model {model!r} embeds {min(embedded)} tokens, and dataset {dataset.name!r} has {dataset.num_tokens}; "
            f"set model.vocabulary={dataset.num_tokens}"
        )


def check_outputs(task: Classification, model: str, dataset: Dataset, params: Tree) -> None:
    """RayflError unless the model returns logits [2, num_classes] for two train samples, as the loss needs them.

    It runs in evaluation mode and restores torch's generator, so that no bit of a run depends on it.
    """
    samples = dataset.train
    inputs = dataset.normalise(torch.from_numpy(samples.inputs[:2]))
    batch = Batch(inputs, torch.from_numpy(samples.labels[:2]))
    shape, wanted = list(inputs.shape), [len(inputs), dataset.num_classes]
    given = f"model {model!r} gets inputs {shape}, {len(inputs)} samples of dataset {dataset.name!r}"
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad():
            found = task.evaluated(params, batch)
    except Exception as error:
        raise RayflError(f"{given}, and raises {error_text(error)}; it must return logits {wanted}") from error
    if not isinstance(found, Tensor):
        what = f"a value of type {type(found).__name__}"
    elif list(found.shape) != wanted:
        what = str(list(found.shape))
    elif not found.is_floating_point():
        what = f"values of type {found.dtype}"
    else:
        return
    raise RayflError(f"{given}, and returns {what}; it must return logits {wanted}, one for each class")


def check(setup: Setup, experiment: Experiment) -> None:
    """Raise RayflError if method, model, engine and machine do not fit each other."""
    if setup.topology is not None:
        peers = setup.num_clients
        # Who receives from whom, and the weights.
        memory.require(17 * peers**2, f"a graph of clients.count={peers} peers", "lower clients.count")
    check_setup(setup)
    stacked = setup.work_width * tree.num_bytes(setup.initial_arrays)
    memory.require(stacked, f"runtime.stack_width={setup.work_width} copies of the model", "lower it")
    runtime = experiment.runtime
    if runtime.object_store_memory_mb and runtime.cluster is None:
        store = f"runtime.object_store_memory_mb={runtime.object_store_memory_mb}"
        memory.require(10**6 * runtime.object_store_memory_mb, store, "lower it")
    if experiment.runtime.executor == "inline" and setup.device_name == "cuda" and not torch.cuda.is_available():
        raise RayflError("runtime.device='cuda' needs a GPU, and this machine has none; use device='cpu'")


def make_partition(experiment: Experiment, dataset: Dataset) -> Partition:
    """The samples of each client, without the splits that the experiment or the method sets aside."""
    generator = seeding.generator(experiment.seed, purpose="partition")
    with _naming(experiment.partition, "split"):
        partition = experiment.partition.split(dataset, experiment.clients.count, generator)
    defaults = experiment.method.splits
    ratios = {
        "validation": experiment.splits.validation_ratio,
        "heldout": experiment.splits.heldout_ratio,
    }
    validation, heldout = (defaults.get(name, 0.0) if ratio is None else ratio for name, ratio in ratios.items())
    return partition.hold_out(validation, heldout, seeding.generator(experiment.seed, purpose="splits"))
