"""Lists of the methods, models, ... that an experiment can choose, and one page about each, made from docstrings."""

import inspect
import sys

from pydantic.fields import FieldInfo
from rich.table import Table
from rich.text import Text

from jobs.display import first_sentence, print_table, say
from rayfl import toml
from rayfl.choices.kinds import Kind, find, known
from rayfl.experiment.experiment import CHOSEN, LISTED
from rayfl.experiment.unknown_keys import settings_of
from rayfl.methods.base import Method, ServerHalf
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.settings import describe, shown
from rayfl.untyped import Anything, Value


def print_list(table: str) -> None:
    """Print everything that the experiment's `table` can choose: names, descriptions and settings."""
    kind = LISTED[table]
    listed = Table(kind.label, *["where"] * (kind is Method), "what it is", "settings")
    for name, component in sorted(known(kind).items()):
        if kind is Method:
            paper = component.paper
            where = "server" if issubclass(component, ServerHalf) else "peers"
            own_settings = [key for key in settings_of(component) if key not in LocalTraining.model_fields]
            listed.add_row(name, where, Text(paper), ", ".join(own_settings))
        else:
            settings = [
                key if default == "required" else f"{key} = {default}" for key, default, *_ in setting_rows(component)
            ]
            listed.add_row(name, Text(what_it_is(component)), Text("\n".join(settings)))
    print_table(listed, 120)


def print_one(table: str, name: str) -> None:
    """Print the description, the settings and an example of the choice called `name` (a method, a model, ...).

    Raise RayflError if no such choice exists.
    """
    kind = LISTED[table]
    component = find(kind, name)
    say(f"{kind.label} {name}\n")
    newcomers = [for_newcomers(component)] if isinstance(component, type) and issubclass(component, Method) else []
    say("\n\n".join([*about(component), *newcomers]) + "\n")
    if rows := setting_rows(component):
        listed = Table("setting", "default", "allowed", "what it is")
        for key, *texts in rows:
            listed.add_row(key, *map(Text, texts))
        print_table(listed, 120)
    say(f"\n{toml.dumps(in_table(table, example(name, component)))}")


def example(name: str, component: Anything) -> dict[str, Value]:
    """A TOML table that chooses `component`, with its required settings."""
    fields = settings_of(component).items()
    return {"name": name} | {key: (field.examples or [None])[0] for key, field in fields if field.is_required()}


def in_table(table: str, choice: dict[str, Value]) -> dict[str, Value]:
    """The experiment's tables that hold a choice: under `table`, or in the list of that dotted name."""
    if table in CHOSEN:
        return {table: choice}
    outer, _, name = table.partition(".")
    return {outer: {name: [choice]} if name else [choice]}


def setting_rows(component: Anything) -> list[tuple[str, str, str, str]]:
    """A row for each setting: name, default, allowed values, description."""
    return [
        (
            name,
            "required" if field.is_required() else _shown(field.get_default(call_default_factory=True)),
            _allowed(field),
            field.description or "",
        )
        for name, field in settings_of(component).items()
    ]


def about(component: Anything) -> list[str]:
    """The paragraphs of a docstring. For a method, the docstring of its module, with the paper, comes first."""
    texts = [inspect.getdoc(component)]
    if isinstance(component, type) and issubclass(component, Method):
        texts.insert(0, inspect.cleandoc(sys.modules[component.__module__].__doc__ or component.paper))
    return [text for text in texts if text]


def for_newcomers(method: type[Method]) -> str:
    """A sentence on a client that comes for the first time, as `clients.unseen` evaluates it."""
    adapts = method.eval_stages is not Method.eval_stages
    return {
        "model": f"An unseen client takes the global model{', and adapts it' * adapts} before it is evaluated.",
        "round": "An unseen client downloads, does the local work of one round, sends nothing, and is then evaluated.",
        "undefined": "It has no model for an unseen client.",
    }[str(method.capabilities.newcomer)]


def what_it_is(component: Anything) -> str:
    """The first sentence of the docstring."""
    return first_sentence((inspect.getdoc(component) or "").split("\n\n")[0])


def _allowed(field: FieldInfo) -> str:
    """The allowed values of a setting, in words."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Kind):
        return f"a {kind.__name__.lower()}, by its name or as a table"
    return describe(kind, field.metadata).removesuffix(", or be left out")


def _shown(value: Value) -> str:
    if value is None:
        return "none"
    return shown(value) if isinstance(value, bool | tuple) else str(getattr(value, "name", value))
