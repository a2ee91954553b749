"""Make the setup of an experiment: load and partition the data, build model and method, check that they fit."""

import math
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rayfl import tree
from rayfl.choices import plugins
from rayfl.choices.kinds import Kind
from rayfl.data.batches import first_two
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.loading import read_dataset
from rayfl.data.partition import Partition, Shards
from rayfl.determinism import seeding, torch_flags
from rayfl.determinism.global_draws import key, preserved
from rayfl.determinism.process import prepare_process
from rayfl.errors import HookError, RayflError, error_text, out_of_memory
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.report_options import check_report
from rayfl.limits import memory
from rayfl.methods.shared.own_parts import Parts, with_parts
from rayfl.models.part_names import chosen
from rayfl.models.start_weights import read_backbone, read_weights
from rayfl.network import Network
from rayfl.population.sampling import Population, attackers
from rayfl.rounds.check_hooks import checked, checked_hook
from rayfl.rounds.check_setup import check_setup, checked_stop
from rayfl.rounds.setup import Setup
from rayfl.run_directory.trackers.tracker import require_installed
from rayfl.settings import Settings, ThirdPartySetting, class_id, is_ours, read_here, shown
from rayfl.task import NetworkTask
from rayfl.tasks.several_targets import WithSeveralTargets
from rayfl.tasks.supervised import task_for
from rayfl.tasks.trial import Trial
from rayfl.topology.graphs import SparseTopology

EVALUATED_RATIO = 0.2
"""The share of the train examples on which `evaluation.split` "validation" evaluates, if none is given."""
STORE_SHARE = 0.3
"""The share of a machine's memory that Ray takes for its object store."""


@torch_flags.own_flags()
@preserved()
def prepare(experiment: Experiment) -> Setup:
    """The setup, which is the same in all rounds.

    Raise RayflError if parts of the experiment do not fit each other.
    """
    model = experiment.model
    seed = experiment.seed
    with _naming_failed_code(experiment):
        unread = third_party_settings(experiment)
        require_installed(experiment.output.track)
        prepare_process()
        key(seed, purpose="data")
        dataset = read_dataset(experiment.data)
        # Files that have been read before may be read without draws.
        key(seed, purpose="preparation")
        dataset, partition = split_data(experiment, dataset)
        if share := experiment.data.flipped_clients:
            clients = attackers(seed, experiment.clients.num_seen, share)
            dataset = with_flipped_labels(dataset, partition, share, clients)
        task = make_task(experiment, dataset)
        method = experiment.method.make(task, experiment.rounds)
        for wrapper in experiment.wrap:
            method = checked(wrapper.around, "a method", lambda wrapped: callable(wrapped.plan))(method)
        topology = None if experiment.topology is None else experiment.topology.read(experiment.clients.num_seen)
        weights = task.network.first_weights(task.network.seed)
        if model.start is not None and experiment.adapters is None:
            weights = read_weights(Path(model.start), weights, model.name, task.network.stored_names)
        elif model.start is not None:
            trained = {name for _, _, name in task.network.slots}
            weights = read_backbone(Path(model.start), weights, trained, model.name, task.network.stored_names)
        params = split_weights(experiment.parts, model.name, task.network, weights, dataset)
        if task.network.local:
            method = with_parts(method, experiment.parts)
        initial = checked_hook(method.init_params)(params, seeding.FirstDraws(seed, seeding.NOBODY))
    if model.start is not None and any(initial[name] is not params[name] for name in params):
        raise RayflError(f"method {experiment.method.name!r} starts from weights of its own; remove model.start")
    runtime = experiment.runtime
    setup = Setup(
        seed=seed,
        rounds=experiment.rounds,
        method=method,
        dataset=dataset,
        partition=partition,
        population=Population(experiment.clients, seed, partition.train.sizes),
        initial_arrays=tree.to_arrays(initial),
        uplink=experiment.uplink,
        downlink=experiment.downlink,
        topology=topology,
        evaluation=experiment.evaluation.model_copy(
            update={} if method.capabilities.has_global_model else {"pooled": False}
        ),
        selection=experiment.selection,
        schedule=experiment.schedule,
        engine_name=runtime.engine,
        stack_width=runtime.stack_width,
        device_name=runtime.device_name,
        server_on_device=runtime.server_on_device,
        graphs=runtime.graphs,
        threads=runtime.threads,
        precision=runtime.precision,
    )
    check(setup, experiment, task)
    stop = None if experiment.stop is None else checked_stop(experiment.stop, setup)
    return replace(setup, stop=stop, unread=[setting for setting in unread if setting.id not in read_here()])


def third_party_settings(experiment: Experiment) -> list[ThirdPartySetting]:
    """The settings that the experiment gives to third-party classes and that no class of ours declares."""
    foreign: list[ThirdPartySetting] = []
    listed = [("evaluation.metrics", settings) for settings in experiment.evaluation.metrics or ()]
    listed += [("wrap", settings) for settings in experiment.wrap]
    for table, settings in (*experiment, ("method", experiment.method.hyper), *listed):
        if isinstance(settings, Settings):
            kind = experiment.method.kind if table == "method" else type(settings)
            declared = [getattr(base, "model_fields", ()) for base in type(settings).__mro__ if is_ours(base)]
            # To iterate over `settings` would yield cached properties, too.
            for name in type(settings).model_fields:
                if settings.is_given(name) and not any(name in fields for fields in declared):
                    taker = f"{kind.__name__} ({plugins.place_of(kind)})"
                    foreign.append(
                        ThirdPartySetting(
                            table, (class_id(type(settings)), name), shown(getattr(settings, name)), taker
                        )
                    )
    return foreign


@contextmanager
def _naming_failed_code(experiment: Experiment) -> Iterator[None]:
    """Turn an unexpected error in a class that the experiment chose into one that names the code and its line."""
    try:
        yield
    except (RayflError, HookError, OSError, KeyboardInterrupt):
        raise
    except BaseException as error:
        chosen = (experiment.data, experiment.partition, experiment.task, experiment.topology, *experiment.wrap)
        kinds = (*(type(settings) for settings in chosen), experiment.method.kind)
        modules = {base.__module__ for kind in kinds for base in kind.__mro__ if issubclass(base, Kind)}
        frames = [
            frame for frame in traceback.walk_tb(error.__traceback__) if frame[0].f_globals["__name__"] in modules
        ]
        if not frames or out_of_memory(error):
            raise
        code, line = frames[-1][0].f_code, frames[-1][1]
        raise HookError(f"{code.co_qualname} ({code.co_filename}:{line}): {error_text(error)}") from error


def make_task(experiment: Experiment, dataset: Dataset) -> NetworkTask:
    """The task, by default one for the data, bound to the model on the data's examples.

    Raise RayflError if the three do not fit, or if this machine has no memory for the model and its gradient.
    """
    model = experiment.model
    task = experiment.task or task_for(dataset)
    if dataset.targets is not None:
        task = WithSeveralTargets(single=task, layout=dataset.targets)
    options = ", ".join(f"model.{key}={shown(value)}" for key, value in model if isinstance(value, int | tuple))
    what = f"model {model.name!r} ({options})" if options else f"model {model.name!r}"
    # The module has no storage here, and torch counts its entries in 64 bits.
    try:
        build = model.builder(dataset.input_shape, task.num_outputs(dataset), dataset.layout)
        build = build if experiment.adapters is None else experiment.adapters.builder(build)
        build = experiment.parts.builder(build, model.name)
        seed = seeding.torch_seed(experiment.seed, purpose="initial parameters")
        precision = experiment.runtime.precision
        network = Network(build, dataset.input_shape, model.memory_format, precision, seed, dataset.layout)
    except (RuntimeError, OverflowError, TypeError):
        if not options:
            raise
        raise RayflError(f"{what} has more entries than torch can count; make it smaller") from None
    entries = sum(math.prod(parameter.shape) for parameter in network.module.parameters())
    memory.require(2 * 4 * entries, f"{what} with its gradient", "make it smaller")
    task.check(dataset, network)
    return NetworkTask(network, task)


def split_weights(parts: Parts, model: str, network: Network, weights: tree.Tree, dataset: Dataset) -> tree.Tree:
    """The shared ones among `weights`; the network keeps the others. Raise RayflError if `[parts]` does not fit."""
    moving = frozenset[str]()
    personal = chosen(parts.personal, network.module, model)
    if network.buffer_slots:
        # A model that does not run is refused by `Trial.check`.
        with suppress(Exception):
            moving = network.changed_buffers(first_two(dataset).inputs)
    if parts.buffers != "average" and not moving:
        raise RayflError(
            f"={parts.buffers!r} does nothing, as training changes no buffer of model {model!r}; remove it",
            ("parts", "buffers"),
        )
    return network.keep_constants(weights, personal, moving, frozen=parts.buffers == "frozen")


def check(setup: Setup, experiment: Experiment, task: NetworkTask) -> None:
    """Raise RayflError if data, model, method, engine and machine do not fit each other."""
    in_stacks = setup.engine_name == "vmap" or (setup.engine_name == "auto" and setup.device_name == "cuda")
    Trial(task.network, task.task, setup.dataset, experiment.model, setup.first_model, in_stacks).check()
    uses_graph = setup.method.capabilities.uses_graph
    if setup.topology is not None and (uses_graph or not isinstance(setup.topology, SparseTopology)):
        peers = setup.num_clients
        # Bytes per pair of peers: whether one receives from the other, and the weights.
        memory.require(17 * peers**2, f"a graph of clients.count={peers} peers", "lower clients.count")
    check_setup(setup)
    runtime = experiment.runtime
    store_bytes = 10**6 * (runtime.object_store_memory_mb or 0)
    for wrapper in experiment.wrap:
        checked(wrapper.check)(setup, store_bytes or int(STORE_SHARE * memory.machine_bytes()))
    check_report(experiment.report, setup.metric_facts)
    stacked = setup.work_width * tree.num_bytes(setup.initial_arrays)
    memory.require(stacked, f"runtime.stack_width={setup.work_width} copies of the model", "lower it")
    if store_bytes and runtime.cluster is None:
        memory.require(store_bytes, f"runtime.object_store_memory_mb={runtime.object_store_memory_mb}", "lower it")
    if runtime.executor == "inline" and setup.device_name == "cuda" and not torch.cuda.is_available():
        raise RayflError("runtime.device='cuda' needs a GPU, and this machine has none; use device='cpu'")


def with_flipped_labels(dataset: Dataset, partition: Partition, share: float, clients: Iterable[int]) -> Dataset:
    """The dataset in which the attacking `clients`' labels are flipped, in all that is not their test split.

    share: the setting `data.flipped_clients`.
    """
    if not dataset.has_classes:
        raise RayflError(
            f"={share:g} flips classes, and the labels of dataset {dataset.name!r} are not classes; remove it",
            ("data", "flipped_clients"),
        )
    labels = dataset.train.labels.copy()
    for client in clients:
        rows = np.concatenate([partition.split(split)[client] for split in ("train", "validation", "heldout")])
        labels[rows] = dataset.num_classes - 1 - labels[rows]
    return replace(dataset, train=replace(dataset.train, labels=labels))


def assigned(experiment: Experiment, dataset: Dataset) -> tuple[Dataset, Partition]:
    """The dataset, and the train and test examples of each client. Raise RayflError if the partition does not fit."""
    generator = seeding.generator(experiment.seed, purpose="partition")
    return experiment.partition.assign(dataset, experiment.clients.count, generator)


def split_data(experiment: Experiment, dataset: Dataset) -> tuple[Dataset, Partition]:
    """The dataset, and the examples of each client without the splits that the experiment or the method sets aside.

    With `evaluation.split` "validation" a further share of the train examples replaces the test examples. The unseen
    clients are drawn from the seed among the partition's clients; they get the last numbers.
    """
    dataset, partition = assigned(experiment, dataset)
    defaults = {key: share for part in (experiment.method.kind, *experiment.wrap) for key, share in part.splits.items()}
    splits = experiment.splits
    validation = defaults.get("validation", 0.0) if splits.validation_ratio is None else splits.validation_ratio
    heldout = defaults.get("heldout", 0.0) if splits.heldout_ratio is None else splits.heldout_ratio
    if experiment.evaluation.split == "validation":
        if splits.validation_ratio == 0:
            raise RayflError("=0 leaves no data for evaluation.split='validation'", ("splits", "validation_ratio"))
        generator = seeding.generator(experiment.seed, purpose="judged split")
        partition = partition.hold_out(splits.validation_ratio or EVALUATED_RATIO, 0.0, generator)
        rows = partition.validation.indices
        train = dataset.train
        dataset = replace(dataset, test=Examples(train.inputs[rows], train.labels[rows], place=train.place))
        partition = replace(partition, test=Shards(np.arange(len(rows)), partition.validation.offsets))
        # What is left is cut again only for a method that chooses by validation data itself.
        validation = validation if "validation" in defaults else 0.0
    partition = partition.hold_out(validation, heldout, seeding.generator(experiment.seed, purpose="splits"))
    unseen = experiment.clients.unseen_numbers(experiment.seed)
    return dataset, partition.with_last(unseen) if unseen else partition
