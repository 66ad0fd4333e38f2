"""The Hamiltonian at one k, its eigenvalues, and the density of states of a grid of k-points.

H(k) = Σ_R exp(2πi k·R) H(R) with k in units of the reciprocal lattice vectors. Must never know of clusters.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import linalg, sparse

from onehop.demo.model import HOME, FloatArray, LatticeVector, NoTBModel

KPoint = tuple[float, float, float]


def phase(vector: LatticeVector, k: KPoint) -> complex:
    """The factor exp(2πi k·R)."""
    return cmath.exp(2j * cmath.pi * sum(r * x for r, x in zip(vector, k, strict=True)))


def bloch_sum(matrices: dict[LatticeVector, sparse.csr_matrix], k: KPoint) -> sparse.csr_matrix:
    """Σ_R exp(2πi k·R) M(R) as one sparse matrix."""
    terms = [phase(vector, k) * matrix for vector, matrix in matrices.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.tocsr()


def eigenvalues_ev(model: NoTBModel, k: KPoint) -> FloatArray:
    """All band energies at k, ascending, by exact diagonalisation of dense matrices.

    A generalised problem where the overlaps are not the identity.
    """
    hamiltonian = bloch_sum(model.hoppings, k).toarray()
    if model.is_orthogonal:
        return np.asarray(linalg.eigvalsh(hamiltonian), dtype=np.float64)
    overlap = bloch_sum(model.overlaps, k).toarray()
    try:
        return np.asarray(linalg.eigh(hamiltonian, overlap, eigvals_only=True), dtype=np.float64)
    except linalg.LinAlgError as error:
        error.add_note(f"the overlap matrix at k = {k} is not positive definite")
        raise


def levels_ev(model: NoTBModel, kpoints: Sequence[KPoint]) -> FloatArray:
    """Band energies of a small orthogonal model at many k-points at once, one row for each."""
    vectors = np.array(list(model.hoppings))
    blocks = np.array([matrix.toarray() for matrix in model.hoppings.values()])
    found = []
    for first in range(0, len(kpoints), 1024):  # a bound on the memory of the stacked matrices
        phases = np.exp(2j * np.pi * np.array(kpoints[first : first + 1024]) @ vectors.T)
        found.append(np.linalg.eigvalsh(np.tensordot(phases, blocks, axes=1)))
    return np.asarray(np.concatenate(found), dtype=np.float64)


class HamiltonianAt:
    """H(k) as something to multiply vectors with, without a second copy of the model.

    In a large cell nearly all elements belong to R = 0, which has no phase: that matrix is used where it lies. Only
    what crosses the cell's faces is summed.
    """

    def __init__(self, model: NoTBModel, k: KPoint) -> None:
        self._home = model.hoppings[HOME]
        rest = {vector: matrix for vector, matrix in model.hoppings.items() if vector != HOME}
        self._faces = bloch_sum(rest, k) if rest else None

    def __matmul__(self, vector: npt.NDArray[np.complex128]) -> npt.NDArray[np.complex128]:
        product = self._home @ vector
        if self._faces is not None:
            product += self._faces @ vector
        return np.asarray(product, dtype=np.complex128)


def grid(counts: tuple[int, int, int]) -> list[KPoint]:
    """A regular grid that avoids the origin; every point has the same weight, no symmetry is used."""
    axes = [(np.arange(count) + 0.5) / count for count in counts]
    return [(float(x), float(y), float(z)) for x in axes[0] for y in axes[1] for z in axes[2]]


def gaussian_dos(
    energies_ev: FloatArray, levels_ev: Iterable[FloatArray], sigma_ev: float
) -> FloatArray:
    """Density of states per eV and cell from the levels at equally weighted k-points.

    Parameters
    ----------
    energies_ev : ndarray
        Where the density is wanted.
    levels_ev : iterable of ndarray
        The eigenvalues, one array for each k-point.
    sigma_ev : float
        Standard deviation of the Gaussian that each level becomes.
    """
    total = np.zeros(len(energies_ev))
    count = 0
    for levels in levels_ev:
        count += 1
        distance = (energies_ev[:, None] - levels[None, :]) / sigma_ev
        total += np.exp(-0.5 * distance**2).sum(axis=1)
    return np.asarray(total / (count * sigma_ev * np.sqrt(2 * np.pi)), dtype=np.float64)
