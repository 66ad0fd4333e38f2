"""Fixtures of the demo's tests. Must never need a cluster."""

from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("scipy")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real Wannier90 files, kept beside the repository."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real Wannier90 files are not here: no folder {folder}")
    return folder
