"""What can be set for the calls made through a cluster: one immutable record.

Must never know what the options do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from onehop._protocol.messages import URGENT


class Options(NamedTuple):
    """See `Cluster.options`."""

    retries: int = 0
    timeout: float | None = None
    urgent: bool = False
    on_error: Callable[[BaseException], Any] | None = None
    progress: bool | str = False
    batch_size: int | None = None

    @property
    def flags(self) -> int:
        """As they travel with a call."""
        return URGENT if self.urgent else 0

    def merged(self, **given: Any) -> Options:
        """These options with what is given and not None; checks the values."""
        known = {name: value for name, value in given.items() if value is not None}
        unknown = known.keys() - set(self._fields)
        if unknown:
            raise TypeError(
                f"unknown option(s) {', '.join(sorted(unknown))}; there are {', '.join(self._fields)}"
            )
        for name, least in (("retries", 0), ("batch_size", 1)):
            value = known.get(name, least)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")
        timeout = known.get("timeout", 1.0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout is a number of seconds above 0, not {timeout!r}")
        on_error = known.get("on_error")
        if on_error is not None and not callable(on_error):
            raise TypeError(f"on_error is called with an exception; {on_error!r} cannot be called")
        return self._replace(**known)


PLAIN = Options()
"""Nothing is set."""
