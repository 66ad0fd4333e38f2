"""Memory tests make trackers of their own, so the process's must not watch the same pages."""

from __future__ import annotations

import pytest

from onehop._memory import tracker


@pytest.fixture(autouse=True)
def no_tracker_of_the_process() -> None:
    """End the one that clusters of earlier tests had: no cluster is left that could ask it."""
    if tracker._tracker is not None:
        tracker._tracker.close()
        tracker._tracker = None
