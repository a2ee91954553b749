"""Suggests a key for an unknown one: by the words of other tools, other tables, other methods."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic.fields import FieldInfo

from rayfl.choices.kinds import Kind, known
from rayfl.errors import RayflError, UnknownKey
from rayfl.settings import Settings, listed

OTHER_WORDS: Mapping[str, str] = {
    word: key
    for key, words in {
        "rounds": "num_rounds n_rounds global_rounds comm_rounds communication_rounds max_rounds",
        "seed": "random_seed random_state manual_seed",
        "data": "dataset",
        "model": "network net architecture arch",
        "method": "algorithm algo strategy aggregation aggregator",
        "partition": "partitioner partitioning split_type",
        "uplink": "compressor compression",
        "method.lr": "learning_rate learningrate client_lr local_lr local_learning_rate step_size stepsize eta",
        "method.epochs": "local_epochs num_epochs num_local_epochs local_ep epoch",
        "method.steps": "local_steps num_steps num_local_steps local_iterations iterations",
        "method.batch_size": "batchsize batch bs local_bs local_batch_size train_batch_size",
        "method.optimizer": "optim client_optimizer local_optimizer optimiser",
        "method.weight_decay": "wd l2 weightdecay",
        "method.clip_norm": "clip grad_clip gradient_clipping max_grad_norm clip_grad_norm",
        "method.mu": "proximal_mu prox_mu",
        "partition.alpha": "dirichlet_alpha dir_alpha",
        "clients.count": "num_clients n_clients number_of_clients num_users total_clients num_peers",
        "clients.per_round": "clients_per_round num_clients_per_round participants min_fit_clients sample_size",
        "clients.fraction": "fraction_fit client_fraction frac sample_ratio participation_rate participation",
        "evaluation.every": "eval_every evaluate_every test_every eval_interval eval_freq",
        "runtime.actors": "num_actors workers num_workers",
        "runtime.num_gpus": "gpus gpu gpus_per_client num_gpus_per_client",
        "wrap": "elastic",
        "output.directory": "output_dir save_dir log_dir results_dir",
        "stop": "early_stop early_stopping earlystopping early_stopper",
        "stop.patience": "patience early_stopping_patience",
        "stop.target": "target_accuracy target_acc goal",
        "model.hidden": "hidden_size hidden_sizes hidden_dim",
    }.items()
    for word in words.split()
}
"""Words of other tools and of papers, and our key."""
Chosen: TypeAlias = Mapping[str, type[Kind]]
"""The tables of an experiment that choose a method, a model, ... by its name."""
_MOST_SHOWN = 3


# Any: what the user gave.
def explained(error: UnknownKey, experiment: type[Settings], chosen: Chosen, tables: Mapping[str, Any]) -> RayflError:
    """A better sentence about an unknown key of an experiment (`tables`) if there is one; else `error`."""
    keys = list(error.key)
    if keys == ["tune"]:
        return RayflError(
            "a file with a [tune] table is for: rayfl tune FILE --budget N, which writes one for rayfl run"
        )
    if len(keys) > 2:
        return error
    table, word = keys[0], keys[-1]
    meant = OTHER_WORDS.get(_plain(word), word)
    last = meant.rpartition(".")[2]
    if last in error.known and (len(keys) == 2 or "." not in meant):
        return _meant(error, [last])
    choices = sorted(known(chosen[table]).items()) if len(keys) == 2 and table in chosen else []
    if others := [name for name, component in choices if last in settings_of(component)]:
        return _of_others(error, chosen[table], others, tables[table])
    if parts := [key for key in error.known if len(keys) == 2 and _plain(word) in key.split("_")]:
        return _meant(error, parts)
    is_near = word not in OTHER_WORDS and difflib.get_close_matches(word, error.known)
    keys_meant = keys_meant_by(word, experiment, chosen)
    owners = {
        key: name for name, component in choices for key in settings_of(component) if _plain(word) in key.split("_")
    }
    if owners and not error.known:
        words = [f"{key!r} of {name!r}" for key, name in owners.items()][:_MOST_SHOWN]
        return RayflError(f"': did you mean {listed(words, 'or')}?", error.key, error.lead)
    # A word of several other tables says nothing about this one.
    return error if is_near or not keys_meant or (choices and len(keys_meant) > 1) else _meant(error, keys_meant)


def keys_meant_by(word: str, experiment: type[Settings], chosen: Chosen) -> list[str]:
    """The dotted keys that a word may mean: ours for another tool's word, else all keys that end in it."""
    plain = _plain(word)
    meant = OTHER_WORDS.get(plain)
    return (
        [meant]
        if meant
        else [key for key in _every_key(experiment, chosen) if key.rpartition(".")[2] == plain][:_MOST_SHOWN]
    )


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def _every_key(experiment: type[Settings], chosen: Chosen) -> list[str]:
    """Every key of an experiment, those of all methods, models, ... among them."""
    fields = experiment.model_fields
    fixed = [
        f"{name}.{key}"
        for name, field in fields.items()
        if name not in chosen and isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
        for key in field.annotation.model_fields
    ]
    choices = [
        f"{name}.{key}"
        for name, kind in chosen.items()
        for component in known(kind).values()
        for key in settings_of(component)
    ]
    return list(dict.fromkeys([*fields, *fixed, *choices]))


# Any: a class of a kind, or what it adopts.
def settings_of(component: Any) -> Mapping[str, FieldInfo]:
    """The settings of a method, a model, ... by name; none for a function."""
    return getattr(getattr(component, "Hyper", component), "model_fields", {})


def _meant(error: UnknownKey, keys: list[str]) -> RayflError:
    return RayflError(f"': did you mean {listed([repr(key) for key in keys], 'or')}?", error.key, error.lead)


# Any: the table or the object that chooses.
def _of_others(error: UnknownKey, kind: type[Kind], others: list[str], chosen: Any) -> RayflError:
    """The error for a setting that only other methods (models, ...) have; among several it may be left over, if just
    the name was replaced."""
    name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
    names = [repr(other) for other in others[:_MOST_SHOWN]]
    names += [f"{len(others) - _MOST_SHOWN} more"] * (len(others) > _MOST_SHOWN)
    table = error.key[0]
    do = "does" if len(others) == 1 else "do"
    left_over = f" ({table}={name} replaces the whole table, and {table}.name={name} only the name)"
    is_left_over = isinstance(chosen, Mapping) and len(chosen) > 2
    return RayflError(
        f"': {kind.label} {name!r} does not take it, but {listed(names, 'and')} {do}; set {table}.name "
        f"to one that does, or remove it{left_over * is_left_over}",
        error.key,
        error.lead,
    )
