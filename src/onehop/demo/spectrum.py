"""What one task computes at one k-point, and how the tasks' numbers become a density of states.

A small model is diagonalised. A large one is treated by the kernel polynomial method: Chebyshev moments of H(k) between
random-phase vectors (A. Weiße, G. Wellein, A. Alvermann, H. Fehske, Reviews of Modern Physics 78, 275 (2006)). The
seeds are part of the recipe, so that every process finds the same numbers. Must never know of clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onehop.demo.bloch import HamiltonianAt, KPoint, eigenvalues_ev, gaussian_dos, grid, levels_ev
from onehop.demo.model import FloatArray, NoTBModel

Vector = npt.NDArray[np.complex128]

DENSE_ORBITALS = 128
"""Up to this many orbitals a model is diagonalised."""
_CACHED_ELEMENTS = 16_384


class Recipe(NamedTuple):
    """How a spectrum is to be found; the same for all k-points of one sum."""

    moments: int
    """Chebyshev moments; 0 to diagonalise."""
    centre_ev: float
    half_width_ev: float
    """The spectrum must lie within centre ± half width."""
    seed: int


def recipe_for(
    cell: NoTBModel, model: NoTBModel, moments: int, potential_ev: float, seed: int = 1
) -> Recipe:
    """Choose the method for a supercell, and the energies that its spectrum lies in.

    Parameters
    ----------
    cell : NoTBModel
        The unit cell; every level of the supercell is one of its levels at some k.
    model : NoTBModel
        The supercell.
    moments : int
        For the kernel polynomial method; not used for a model small enough to diagonalise.
    potential_ev : float
        The largest potential that may later be added to orbitals; it moves a level by no more than itself.
    """
    kpoints = [*grid((8, 8, 8)), (0.0, 0.0, 0.0)]
    if cell.is_orthogonal:
        levels = levels_ev(cell, kpoints)
    else:
        levels = np.array([eigenvalues_ev(cell, k) for k in kpoints])
    low, high = levels.min() - abs(potential_ev), levels.max() + abs(potential_ev)
    # A level between the points of the coarse grid may lie a little outside: a fiftieth is more than it takes.
    half_width = 1.02 * (high - low) / 2
    if model.norbits <= DENSE_ORBITALS:
        moments = 0
    elif not model.is_orthogonal:
        raise ValueError(
            f"a model of {model.norbits} orbitals with overlaps is too large to diagonalise, and the kernel polynomial "
            "method here is for orthogonal orbitals; use a smaller supercell"
        )
    return Recipe(moments, float(low + high) / 2, float(half_width), seed)


def spectrum(model: NoTBModel, k: KPoint, recipe: Recipe, number: int) -> FloatArray:
    """One task: the levels at k in eV, or the Chebyshev moments of H(k).

    Parameters
    ----------
    model : NoTBModel
        It is only read.
    k : tuple of float
        In units of the reciprocal lattice vectors.
    recipe : Recipe
        How.
    number : int
        Of the k-point; gives each its own random vector.
    """
    if recipe.moments == 0:
        return eigenvalues_ev(model, k)
    random = np.random.default_rng([recipe.seed, number])
    start = np.exp(2j * np.pi * random.random(model.norbits)) / np.sqrt(model.norbits)
    return chebyshev_moments(HamiltonianAt(model, k), start, recipe)


def chebyshev_moments(hamiltonian: HamiltonianAt, start: Vector, recipe: Recipe) -> FloatArray:
    """⟨start|T_n(H scaled to ±1)|start⟩ for n below ``recipe.moments``.

    Two moments for each product with H, by 2 T_m T_n = T_(m+n) + T_(m-n).
    """
    moments = np.empty(recipe.moments + recipe.moments % 2)
    before = start
    now = _twice_scaled(hamiltonian, start, recipe)
    now /= 2
    moments[0] = np.vdot(start, start).real
    moments[1] = np.vdot(start, now).real
    for n in range(2, recipe.moments, 2):
        # `now` is T_(n/2) applied to the start, `before` the one below it.
        after = _twice_scaled(hamiltonian, now, recipe, before)
        moments[n] = 2 * np.vdot(now, now).real - moments[0]
        moments[n + 1] = 2 * np.vdot(after, now).real - moments[1]
        before, now = now, after
    return moments[: recipe.moments]


def _twice_scaled(
    hamiltonian: HamiltonianAt, vector: Vector, recipe: Recipe, minus: Vector | None = None
) -> Vector:
    """2 (H - centre) / half width, applied to a vector, less another vector."""
    product = hamiltonian @ vector
    # In pieces that stay in the cache: the vectors do not fit, and three passes over memory would cost as much as H.
    for first in range(0, len(product), _CACHED_ELEMENTS):
        piece = slice(first, first + _CACHED_ELEMENTS)
        part = product[piece]
        part -= recipe.centre_ev * vector[piece]
        part *= 2 / recipe.half_width_ev
        if minus is not None:
            part -= minus[piece]
    return product


def kernel_dos(
    energies_ev: FloatArray, moments: Sequence[FloatArray], recipe: Recipe, states: int
) -> FloatArray:
    """Density of states per eV from the moments at equally weighted k-points, with Jackson's kernel.

    Parameters
    ----------
    energies_ev : ndarray
        Where the density is wanted.
    moments : sequence of ndarray
        One array for each k-point.
    recipe : Recipe
        That the moments were made with.
    states : int
        What the density integrates to, e.g. the orbitals of the unit cell.
    """
    mean = np.mean(np.array(moments), axis=0)
    count = len(mean)
    n = np.arange(count)
    angle = np.pi / (count + 1)
    kernel = ((count - n + 1) * np.cos(angle * n) + np.sin(angle * n) / np.tan(angle)) / (count + 1)
    x = (energies_ev - recipe.centre_ev) / recipe.half_width_ev
    inside = np.abs(x) < 1
    theta = np.arccos(np.clip(x, -1, 1))
    weights = kernel * mean * np.where(n == 0, 1, 2)
    series = np.cos(np.outer(theta, n)) @ weights
    density = np.zeros(len(energies_ev))
    density[inside] = series[inside] / (np.pi * np.sqrt(1 - x[inside] ** 2))
    return np.asarray(states * density / recipe.half_width_ev, dtype=np.float64)


def moments_of_levels(levels: FloatArray, recipe: Recipe) -> FloatArray:
    """The exact mean of T_n over levels (eV) that are known: what the random vectors estimate."""
    x = (levels.reshape(-1) - recipe.centre_ev) / recipe.half_width_ev
    theta = np.arccos(x)
    return np.array([np.cos(n * theta).mean() for n in range(recipe.moments)])


def resolution_ev(recipe: Recipe) -> float:
    """Standard deviation (at the centre of the spectrum) of what one level becomes."""
    return np.pi * recipe.half_width_ev / recipe.moments if recipe.moments else 0.15


def density_of_states(
    results: Sequence[FloatArray], recipe: Recipe, states: int
) -> tuple[FloatArray, FloatArray]:
    """The density of states of one unit cell from what the tasks returned.

    Parameters
    ----------
    results : sequence of ndarray
        What `spectrum` gave at equally weighted k-points.
    recipe : Recipe
        That was used.
    states : int
        Orbitals of the unit cell, so that supercells of all sizes can be compared.

    Returns
    -------
    energies_ev, density : ndarray
        The density is in states per eV and unit cell.
    """
    reach = 1.05 * recipe.half_width_ev
    energies = np.linspace(recipe.centre_ev - reach, recipe.centre_ev + reach, 801)
    if recipe.moments:
        return energies, kernel_dos(energies, results, recipe, states)
    cells = len(results[0]) / states
    return energies, gaussian_dos(energies, results, resolution_ev(recipe)) / cells


def exact_density_of_states(
    cell: NoTBModel, recipe: Recipe, points: int = 16
) -> tuple[FloatArray, FloatArray]:
    """The same from the exact bands of the unit cell on a grid of points³, with the same broadening."""
    levels = levels_ev(cell, grid((points, points, points)))
    if recipe.moments:
        return density_of_states([moments_of_levels(levels, recipe)], recipe, cell.norbits)
    return density_of_states(list(levels), recipe, cell.norbits)
