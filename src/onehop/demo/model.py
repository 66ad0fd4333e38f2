"""The object that the demo sends about: a tight-binding model as dictionaries of sparse matrices.

Must never know where a model comes from, how it is solved, or that it is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

LatticeVector = tuple[int, int, int]
FloatArray = npt.NDArray[np.float64]
HOME: LatticeVector = (0, 0, 0)


@dataclass
class NoTBModel:
    """A tight-binding model with orbitals that need not be orthogonal.

    Attributes
    ----------
    norbits : int
        Orbitals in one unit cell.
    lat, rlat : ndarray of shape (3, 3)
        Lattice vectors (ångström) and reciprocal lattice vectors as columns; ``lat.T @ rlat`` is 2π times the
        identity.
    hoppings : dict
        For each lattice vector R the matrix ⟨0m|H|Rn⟩ in eV.
    overlaps : dict
        For each R the matrix ⟨0m|Rn⟩.
    positions : dict
        For each R the three matrices ⟨0m|r|Rn⟩ in ångström, one per Cartesian axis.
    """

    norbits: int
    lat: FloatArray
    rlat: FloatArray
    hoppings: dict[LatticeVector, sparse.csr_matrix]
    overlaps: dict[LatticeVector, sparse.csr_matrix]
    positions: dict[LatticeVector, list[sparse.csr_matrix]]

    def matrices(self) -> Iterator[sparse.csr_matrix]:
        """All sparse matrices, in a fixed order."""
        yield from self.hoppings.values()
        yield from self.overlaps.values()
        for three in self.positions.values():
            yield from three

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.lat, self.rlat]
        for matrix in self.matrices():
            arrays += [matrix.data, matrix.indices, matrix.indptr]
        return sum(int(array.nbytes) for array in arrays)

    @property
    def is_orthogonal(self) -> bool:
        """True if the overlap matrix is the identity."""
        for vector, overlap in self.overlaps.items():
            expected = sparse.identity(self.norbits, format="csr") if vector == HOME else None
            difference = overlap if expected is None else overlap - expected
            if difference.nnz and abs(difference).max() > 1e-12:
                return False
        return True


def reciprocal(lat: FloatArray) -> FloatArray:
    """The reciprocal lattice vectors, as columns."""
    return np.asarray(2 * np.pi * np.linalg.inv(lat).T, dtype=np.float64)


def orthogonal_model(
    lat: FloatArray,
    hoppings: dict[LatticeVector, npt.NDArray[np.complex128]],
    sites: FloatArray,
) -> NoTBModel:
    """Build a model of orthogonal orbitals that are eigenstates of position.

    Parameters
    ----------
    lat : ndarray
        Lattice vectors as columns, ångström.
    hoppings : dict
        Dense blocks in eV.
    sites : ndarray of shape (norbits, 3)
        Where each orbital sits, Cartesian, ångström.
    """
    norbits = len(sites)
    stored = {}
    for vector, block in hoppings.items():
        matrix = sparse.coo_matrix(block)
        if vector == HOME:
            # The diagonal is stored even where it is zero: a potential can then be added in place.
            rows, columns = np.nonzero((block != 0) | np.eye(norbits, dtype=bool))
            matrix = sparse.coo_matrix((block[rows, columns], (rows, columns)), shape=block.shape)
        stored[vector] = matrix.tocsr()
    return NoTBModel(
        norbits=norbits,
        lat=lat,
        rlat=reciprocal(lat),
        hoppings=stored,
        overlaps={HOME: sparse.identity(norbits, dtype=np.complex128, format="csr")},
        positions={HOME: [_diagonal(sites[:, axis]) for axis in range(3)]},
    )


def _diagonal(values: FloatArray) -> sparse.csr_matrix:
    return sparse.diags(values.astype(np.complex128), format="csr")


def apply_potential(model: NoTBModel, orbitals: slice, energy_ev: float) -> int:
    """Add a potential to the on-site energies of some orbitals, in place.

    One hopping matrix changes, ``hoppings[0, 0, 0]``, and of it the diagonal only: the model stays Hermitian.

    Returns
    -------
    int
        How many matrix elements were changed.
    """
    matrix = model.hoppings[HOME]
    first, last, _ = orbitals.indices(model.norbits)
    start, stop = matrix.indptr[first], matrix.indptr[last]
    rows = np.repeat(np.arange(first, last), np.diff(matrix.indptr[first : last + 1]))
    places = start + np.flatnonzero(matrix.indices[start:stop] == rows)
    matrix.data[places] += energy_ev
    return len(places)


def pickled_bytes(value: object) -> int:
    """How many bytes a process pool would write for this value; nothing is kept."""
    counter = _Counter()
    pickle.Pickler(counter, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return counter.written_bytes


class _Counter:
    """A file that counts what is written to it, so that 200 MB need not be held to be measured."""

    def __init__(self) -> None:
        self.written_bytes = 0

    def write(self, data: bytes | bytearray | memoryview | pickle.PickleBuffer) -> int:
        size = memoryview(data).nbytes
        self.written_bytes += size
        return size
