"""A real job for the cluster: the density of states of a crystal from a tight-binding Hamiltonian.

Written as a user would write it, with numpy and scipy and the public names of onehop only. The physics
(`model`, `vogl`, `wannier`, `supercell`, `bloch`, `spectrum`) must never know that a cluster exists.
"""

from __future__ import annotations

import importlib.util

from onehop.errors import MissingExtraError

__all__ = ["require"]


def require(*modules: str) -> None:
    """Check that optional packages are installed, before anything imports them.

    Parameters
    ----------
    *modules : str
        Top-level names, as in an import statement.

    Raises
    ------
    MissingExtraError
        Naming what is absent and the command that installs it.
    """
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingExtraError(
            f"the demo needs {' and '.join(absent)}, not installed for this Python; "
            "get all that it needs with: pip install 'onehop[demo]'"
        )
