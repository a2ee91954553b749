"""Compressors inside compressors: fields that take the table of one, and are written back as its table."""

from typing import Any

from pydantic import BeforeValidator, PlainSerializer

from rayfl.compress.base import Compressor


# Any: what a TOML file holds, or an instance from Python.
def resolve(kind: type[Compressor], given: Any) -> Any:
    """The compressor that a table or a name tells; anything else as it is. ValueError where it is none of `kind`."""
    from rayfl.experiment.methods_registry import compressor, named

    table = {"name": given} if isinstance(given, str) else given
    found = compressor(table) if isinstance(table, dict) else given
    if isinstance(found, Compressor) and not isinstance(found, kind):
        known = [name for name, one in named(Compressor).items() if issubclass(one, kind)]
        raise ValueError(f"{found.name!r} is no {kind.__name__.lower()}; give one of {', '.join(known)}")
    return found


def from_table(kind: type[Compressor]) -> BeforeValidator:
    """For the annotation of a field of type `kind`: it takes a name, a table with a name, or an instance."""
    # Any: see `resolve`.
    return BeforeValidator(lambda given: resolve(kind, given))


def table(compressor: Compressor) -> dict[str, Any]:
    """What `resolve` reads: a field typed by a base class would be written without its settings."""
    return {"name": compressor.name, **compressor.model_dump()}


TO_TABLE = PlainSerializer(table)
