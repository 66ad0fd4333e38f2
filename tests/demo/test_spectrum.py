"""Supercells, Bloch sums and densities of states against exact diagonalisation."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, sparse

from onehop.demo.bloch import (
    HamiltonianAt,
    KPoint,
    bloch_sum,
    eigenvalues_ev,
    gaussian_dos,
    grid,
    levels_ev,
)
from onehop.demo.model import HOME, NoTBModel, apply_potential, pickled_bytes, reciprocal
from onehop.demo.spectrum import (
    Recipe,
    chebyshev_moments,
    density_of_states,
    exact_density_of_states,
    kernel_dos,
    moments_of_levels,
    recipe_for,
    spectrum,
)
from onehop.demo.supercell import repeat_for_size, supercell
from onehop.demo.vogl import gallium_arsenide


def folded(k: KPoint, repeat: int) -> list[KPoint]:
    """The k-points of the unit cell that k of the supercell stands for."""
    shifts = itertools.product(range(repeat), repeat=3)
    return [tuple((x + s) / repeat for x, s in zip(k, shift, strict=True)) for shift in shifts]  # type: ignore[misc]


def random_model(seed: int, norbits: int = 2, overlaps: bool = False) -> NoTBModel:
    """A Hermitian model with long hops, positions that are not diagonal, and overlaps if wanted."""
    random = np.random.default_rng(seed)

    def blocks(home: float, strength: float) -> dict[tuple[int, int, int], sparse.csr_matrix]:
        made = {}
        for vector in [(1, 0, 0), (0, 2, -1), (-3, 1, 1)]:
            shape = (2, norbits, norbits)
            real, imaginary = strength * random.normal(size=shape)
            made[vector] = sparse.csr_matrix(real + 1j * imaginary)
            made[(-vector[0], -vector[1], -vector[2])] = made[vector].conj().T.tocsr()
        made[HOME] = sparse.csr_matrix(home * np.eye(norbits, dtype=complex))
        return made

    lat = np.array([[3.0, 0.2, 0], [0, 2.5, 0.1], [0, 0, 4.0]])
    three = [blocks(0.3, 0.1) for _ in range(3)]
    return NoTBModel(
        norbits=norbits,
        lat=lat,
        rlat=reciprocal(lat),
        hoppings=blocks(1.0, 1.0),
        overlaps=blocks(1.0, 0.03)
        if overlaps
        else {HOME: sparse.identity(norbits, dtype=complex, format="csr")},
        positions={vector: [one[vector] for one in three] for vector in three[0]},
    )


@pytest.mark.parametrize("repeat", [1, 2, 3])
def test_a_supercell_has_the_levels_of_the_unit_cell(repeat: int) -> None:
    cell = gallium_arsenide()
    k = (0.13, -0.2, 0.41)
    found = eigenvalues_ev(supercell(cell, repeat), k)
    expected = np.sort(levels_ev(cell, folded(k, repeat)).reshape(-1))
    assert found == pytest.approx(expected, abs=1e-9)


@given(seed=st.integers(0, 1000), repeat=st.integers(1, 4), overlaps=st.booleans())
@settings(max_examples=15, deadline=None)
def test_any_model_keeps_its_levels_in_a_supercell(seed: int, repeat: int, overlaps: bool) -> None:
    # Hops reach further than the supercell is wide: they lead round it more than once.
    cell = random_model(seed, overlaps=overlaps)
    k = (0.3, 0.1, -0.2)
    expected = np.sort(np.concatenate([eigenvalues_ev(cell, one) for one in folded(k, repeat)]))
    assert eigenvalues_ev(supercell(cell, repeat), k) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_supercell_knows_where_its_orbitals_are(overlaps: bool) -> None:
    cell = random_model(5, overlaps=overlaps)
    large = supercell(cell, 2)
    # ⟨0m|r|Rn⟩ of the orbitals of cell c = (1, 0, 1), and its neighbour n in the cell c + (1, 0, 0) = (2, 0, 1).
    first, other = 2 * (1 * 4 + 0 * 2 + 1), 2 * (0 * 4 + 0 * 2 + 1)
    origin = cell.lat @ np.array([1, 0, 1])
    for axis in range(3):
        found = large.positions[1, 0, 0][axis].toarray()[first : first + 2, other : other + 2]
        expected = cell.positions[1, 0, 0][axis].toarray()
        if overlaps:
            expected = expected + origin[axis] * cell.overlaps[1, 0, 0].toarray()
        assert found == pytest.approx(expected)
        home = large.positions[HOME][axis].toarray()[first : first + 2, first : first + 2]
        diagonal = cell.positions[HOME][axis].toarray() + origin[axis] * np.eye(2)
        assert home == pytest.approx(diagonal)


def test_the_generalised_problem_is_solved() -> None:
    model = random_model(3, norbits=4, overlaps=True)
    k = (0.2, 0.4, 0.1)
    hamiltonian, overlap = (bloch_sum(m, k).toarray() for m in (model.hoppings, model.overlaps))
    expected = np.sort(linalg.eigvals(np.linalg.solve(overlap, hamiltonian)).real)
    assert not model.is_orthogonal
    assert eigenvalues_ev(model, k) == pytest.approx(expected)
    assert eigenvalues_ev(model, k) != pytest.approx(np.linalg.eigvalsh(hamiltonian), abs=1e-3)


def test_overlaps_that_are_no_overlaps_are_refused_with_the_k_point() -> None:
    model = random_model(3)
    model.overlaps[HOME] = -model.overlaps[HOME]
    with pytest.raises(linalg.LinAlgError) as caught:
        eigenvalues_ev(model, (0.25, 0.0, 0.0))
    assert "k = (0.25, 0.0, 0.0)" in caught.value.__notes__[0]


def test_products_without_a_sum_are_those_of_the_sum() -> None:
    model = supercell(random_model(1, norbits=3), 2)
    k = (0.1, 0.7, 0.35)
    vector = np.exp(2j * np.arange(model.norbits))
    expected = bloch_sum(model.hoppings, k) @ vector
    assert HamiltonianAt(model, k) @ vector == pytest.approx(expected)


def test_moments_are_those_of_the_exact_levels() -> None:
    # For one start vector: Σ over eigenvectors of |⟨v|start⟩|² T_n(level).
    model = supercell(gallium_arsenide(), 2)
    recipe = Recipe(moments=41, centre_ev=-0.3, half_width_ev=13.0, seed=7)
    k = (0.2, 0.3, 0.9)
    random = np.random.default_rng([7, 5])
    start = np.exp(2j * np.pi * random.random(80)) / np.sqrt(80)
    levels, vectors = np.linalg.eigh(bloch_sum(model.hoppings, k).toarray())
    weights = np.abs(vectors.conj().T @ start) ** 2
    theta = np.arccos((levels + 0.3) / 13.0)
    expected = np.array([weights @ np.cos(n * theta) for n in range(41)])
    assert chebyshev_moments(HamiltonianAt(model, k), start, recipe) == pytest.approx(expected)
    recipe_of_task = recipe_for(gallium_arsenide(), supercell(gallium_arsenide(), 3), 41, 0.0)
    assert recipe_of_task.moments == 41
    assert spectrum(model, k, recipe, 5) == pytest.approx(expected)


def test_the_kernel_method_agrees_with_the_exact_bands() -> None:
    cell = gallium_arsenide()
    model = supercell(cell, 6)
    recipe = recipe_for(cell, model, 64, 0.5)
    kpoints = grid((2, 2, 1))
    results = [spectrum(model, k, recipe, number) for number, k in enumerate(kpoints)]
    energies, density = density_of_states(results, recipe, cell.norbits)
    exact = exact_density_of_states(cell, recipe)[1]
    # Each random vector over M orbitals leaves an error of about 1/√M of the density: here 1/√(4 · 2160).
    assert np.abs(density - exact).max() < 0.06 * exact.max()
    assert np.trapezoid(density, energies) == pytest.approx(10, abs=0.05)
    assert np.trapezoid(exact, energies) == pytest.approx(10, abs=0.05)
    # Four valence bands hold eight electrons of both spins, so four states lie below the middle of the gap.
    below = energies < 0.8
    assert np.trapezoid(exact[below], energies[below]) == pytest.approx(4, abs=0.25)


def test_every_trace_vector_together_gives_the_exact_moments() -> None:
    # The unit vectors instead of random ones: no noise is left, and the supercell must give the folded cell's moments.
    cell = gallium_arsenide()
    model = supercell(cell, 2)
    recipe = Recipe(moments=32, centre_ev=-0.3, half_width_ev=13.0, seed=1)
    k = (0.25, 0.5, 0.75)
    hamiltonian = HamiltonianAt(model, k)
    units = np.eye(model.norbits, dtype=complex)
    found = np.mean([chebyshev_moments(hamiltonian, unit, recipe) for unit in units], axis=0)
    levels = levels_ev(cell, folded(k, 2))
    assert found == pytest.approx(moments_of_levels(levels, recipe), abs=1e-12)


def test_a_level_becomes_a_peak_of_unit_area() -> None:
    recipe = Recipe(moments=200, centre_ev=1.0, half_width_ev=10.0, seed=1)
    moments = moments_of_levels(np.array([3.0]), recipe)
    energies = np.linspace(-8.9, 10.9, 4001)
    density = kernel_dos(energies, [moments], recipe, 1)
    assert energies[density.argmax()] == pytest.approx(3.0, abs=0.02)
    assert np.trapezoid(density, energies) == pytest.approx(1, abs=1e-3)
    assert density.min() > -1e-9, "Jackson's kernel leaves nothing negative"
    gaussian = gaussian_dos(energies, [np.array([3.0]), np.array([3.0])], 0.2)
    assert np.trapezoid(gaussian, energies) == pytest.approx(1, abs=1e-6)


def test_the_spectrum_stays_within_the_recipe_after_the_change() -> None:
    cell = gallium_arsenide()
    model = supercell(cell, 2)
    recipe = recipe_for(cell, model, 64, 0.5)
    apply_potential(model, slice(0, 40), 0.5)
    for k in [(0.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.37, 0.11, 0.8)]:
        levels = eigenvalues_ev(model, k)
        assert np.abs(levels - recipe.centre_ev).max() < recipe.half_width_ev


def test_a_potential_changes_the_diagonal_in_place_and_nothing_else() -> None:
    model = supercell(gallium_arsenide(), 2)
    matrix = model.hoppings[HOME]
    before, data = matrix.toarray(), matrix.data
    assert apply_potential(model, slice(10, 30), 0.25) == 20
    assert model.hoppings[HOME] is matrix
    assert matrix.data is data
    expected = before + 0.25 * np.diag([0] * 10 + [1] * 20 + [0] * 50)
    assert matrix.toarray() == pytest.approx(expected)


def test_a_diagonal_of_zeros_is_stored_so_that_it_can_be_changed() -> None:
    cell = gallium_arsenide()
    assert cell.hoppings[HOME].diagonal().all()
    from onehop.demo.model import orthogonal_model

    empty = orthogonal_model(np.eye(3), {HOME: np.zeros((3, 3), complex)}, np.zeros((3, 3)))
    assert apply_potential(empty, slice(None), 1.0) == 3
    assert empty.hoppings[HOME].toarray() == pytest.approx(np.eye(3))


def test_a_large_model_with_overlaps_is_refused() -> None:
    cell = random_model(2, overlaps=True)
    with pytest.raises(ValueError, match="use a smaller supercell"):
        recipe_for(cell, supercell(cell, 5), 64, 0.5)


def test_small_models_are_diagonalised() -> None:
    cell = gallium_arsenide()
    model = supercell(cell, 2)
    recipe = recipe_for(cell, model, 64, 0.5)
    assert recipe.moments == 0
    results = [spectrum(model, k, recipe, number) for number, k in enumerate(grid((4, 4, 4)))]
    energies, density = density_of_states(results, recipe, cell.norbits)
    exact = exact_density_of_states(cell, recipe, points=8)[1]
    assert density == pytest.approx(exact, abs=1e-9), "4 of the doubled cell are 8 of the cell"
    assert np.trapezoid(density, energies) == pytest.approx(10, abs=0.05)


@pytest.mark.parametrize("size_bytes", [1, 300_000, 3_000_000])
def test_the_size_is_foreseen(size_bytes: int) -> None:
    cell = gallium_arsenide()
    repeat = repeat_for_size(cell, size_bytes)
    assert repeat == 1 or supercell(cell, repeat).size_bytes <= 1.02 * size_bytes
    assert supercell(cell, repeat + 1).size_bytes > size_bytes


def test_what_a_pool_pickles_is_counted_exactly() -> None:
    model = supercell(gallium_arsenide(), 3)
    assert pickled_bytes(model) == len(pickle.dumps(model, protocol=pickle.HIGHEST_PROTOCOL))


def test_a_supercell_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 cell"):
        supercell(gallium_arsenide(), 0)
