"""The built-in GaAs against its paper and against closed forms."""

import math

import numpy as np
import pytest

from onehop.demo.bloch import bloch_sum, eigenvalues_ev
from onehop.demo.model import HOME
from onehop.demo.vogl import GALLIUM_ARSENIDE as P
from onehop.demo.vogl import gallium_arsenide

GAMMA, X, L = (0.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.5, 0.5, 0.5)


def pair(first: float, second: float, coupling: float) -> list[float]:
    middle, half = (first + second) / 2, (first - second) / 2
    root = math.hypot(half, coupling)
    return [middle - root, middle + root]


def test_gamma_energies_are_the_published_ones() -> None:
    # Γ1v, Γ15v, Γ1c, Γ15c: the energies that the paper fits for GaAs, to its two decimals; s* is not coupled here.
    expected = [-12.55, 0, 0, 0, 1.55, 4.71, 4.71, 4.71, P.sx_c, P.sx_a]
    assert eigenvalues_ev(gallium_arsenide(), GAMMA) == pytest.approx(expected, abs=0.006)


def test_x_energies_that_were_fitted_are_the_published_ones() -> None:
    levels = eigenvalues_ev(gallium_arsenide(), X)
    assert levels[2] == pytest.approx(-2.89, abs=0.006)  # X5v, twice
    assert levels[3] == pytest.approx(-2.89, abs=0.006)
    assert levels[4] == pytest.approx(2.03, abs=0.006)  # X1c
    assert levels[5] == pytest.approx(2.38, abs=0.006)  # X3c
    gap = levels[4] - eigenvalues_ev(gallium_arsenide(), GAMMA)[1]
    assert gap > 1.55, "GaAs has its smallest gap at the centre of the zone"


def test_all_x_energies_follow_the_closed_forms() -> None:
    # At X = (1, 0, 0) 2π/a the sums over bonds are g0 = g2 = g3 = 0 and |g1| = 1: s and s* of one atom meet px of the
    # other, py meets pz.
    expected = 2 * pair(P.p_a, P.p_c, P.xy)
    for s, sx, p, to_s, to_sx in (
        (P.s_a, P.sx_a, P.p_c, P.sa_pc, P.sxa_pc),
        (P.s_c, P.sx_c, P.p_a, P.pa_sc, P.pa_sxc),
    ):
        block = np.array([[s, 0, to_s], [0, sx, to_sx], [to_s, to_sx, p]])
        expected += list(np.linalg.eigvalsh(block))
    assert eigenvalues_ev(gallium_arsenide(), X) == pytest.approx(sorted(expected), abs=1e-9)


def test_l_energies_follow_the_closed_forms() -> None:
    # At L one bond has the opposite sign of the other three: g0 = -1/2, g1 = g2 = g3 = 1/2. The doublet L3 is made of
    # p across that bond; the rest of s, s* and p along it.
    doublet = pair(P.p_a, P.p_c, (P.xx + P.xy) / 2)
    along = math.sqrt(3) / 2
    rest = np.zeros((6, 6))
    rest[:3, 3:] = [
        [-P.ss / 2, P.sa_pc * along, 0],
        [-P.pa_sc * along, P.xy - P.xx / 2, -P.pa_sxc * along],
        [0, P.sxa_pc * along, 0],
    ]
    rest += rest.T + np.diag([P.s_a, P.p_a, P.sx_a, P.s_c, P.p_c, P.sx_c])
    expected = sorted([*doublet, *doublet, *np.linalg.eigvalsh(rest)])
    assert eigenvalues_ev(gallium_arsenide(), L) == pytest.approx(expected, abs=1e-9)


def test_equivalent_points_have_equal_energies() -> None:
    model = gallium_arsenide()
    at_x = [eigenvalues_ev(model, k) for k in ((0.5, 0.5, 0), (0.5, 0, 0.5), (0, 0.5, 0.5))]
    at_l = [eigenvalues_ev(model, k) for k in (L, (0.5, 0, 0), (0, 0.5, 0), (0, 0, 0.5))]
    for same in (at_x, at_l):
        for other in same[1:]:
            assert other == pytest.approx(same[0], abs=1e-9)


def test_the_model_is_what_it_says() -> None:
    model = gallium_arsenide()
    assert model.norbits == 10
    assert len(model.hoppings) == 7
    assert model.is_orthogonal
    assert model.lat.T @ model.rlat == pytest.approx(2 * np.pi * np.eye(3))
    bond = model.positions[HOME][0].diagonal()[5] * math.sqrt(3)
    assert bond == pytest.approx(2.448, abs=0.001), "Ga-As distance in ångström"
    hamiltonian = bloch_sum(model.hoppings, (0.1, 0.23, -0.4)).toarray()
    assert hamiltonian == pytest.approx(hamiltonian.conj().T)
