"""Methods, in a folder for each family. `rayfl.methods.fedavg` is another name of `rayfl.methods.server.fedavg`, and so
on: whoever imports a method need not know its family."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType


class _Families(MetaPathFinder, Loader):
    """Finds `rayfl.methods.NAME` as the module NAME of a family. Asked only for modules that nobody else finds."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, file = name.rpartition(".")
        files = Path(__file__).parent.glob(f"*/{file}.py") if package == __name__ and file.isidentifier() else ()
        family = next((file.parent.name for file in files if file.parent.name != "shared"), None)
        return spec_from_loader(name, self, origin=f"{__name__}.{family}.{file}") if family else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the other name's spec into the module.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Families())
