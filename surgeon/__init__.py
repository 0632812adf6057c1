"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line, one function a command; the function and its result are in the command's room. Progress is
shown where a listener is given (`with surgeon.ProgressListener() as listener`), errors for the user are `SurgeonError`.
"""

import os
import sys

# `python -m surgeon…` has the working directory first on its path, and this file is the first of surgeon's that runs:
# a `typing.py` that lies there is not what is imported below. So nothing is imported above, not even `__future__`.
if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    del sys.path[0]

from importlib import import_module
from typing import Any

from surgeon._version import __version__ as __version__

# What `import surgeon` offers, and the module that defines it: the lines `from MODULE import NAME as NAME` of the stub
# that type checkers read. Modules load at first use, so that `surgeon --help` does not wait for pydantic.
with open(f"{os.path.splitext(__file__)[0]}.pyi", encoding="utf-8") as _stub:  # noqa: PTH122, PTH123
    _HOMES = {line.split()[3]: line.split()[1].partition(".")[2] for line in _stub if line.startswith("from ")}

__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
