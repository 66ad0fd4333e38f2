"""Gallium arsenide in the published sp3s* nearest-neighbour model.

Source: P. Vogl, H. P. Hjalmarson and J. D. Dow, "A semi-empirical tight-binding theory of the electronic structure
of semiconductors", Journal of Physics and Chemistry of Solids 44 (5), 365-378 (1983), doi 10.1016/0022-3697(83)90064-1;
thirteen parameters for each substance, without spin. Must never know how a model is solved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onehop.demo.model import HOME, LatticeVector, NoTBModel, orthogonal_model

LATTICE_CONSTANT_ANGSTROM = 5.6533
ORBITALS = ("s", "px", "py", "pz", "s*")


class Parameters(NamedTuple):
    """The paper's matrix elements in eV; `a` is the anion, `c` the cation.

    The paper's V are four times the element between two neighbours: it factors 1/4 into the sums g0 to g3 over the
    four bonds.
    """

    s_a: float
    p_a: float
    s_c: float
    p_c: float
    sx_a: float
    sx_c: float
    ss: float
    xx: float
    xy: float
    sa_pc: float
    pa_sc: float
    sxa_pc: float
    pa_sxc: float


GALLIUM_ARSENIDE = Parameters(
    s_a=-8.3431,
    p_a=1.0414,
    s_c=-2.6569,
    p_c=3.6686,
    sx_a=8.5914,
    sx_c=6.7386,
    ss=-6.4513,
    xx=1.9546,
    xy=5.0779,
    sa_pc=4.4800,
    pa_sc=5.7839,
    sxa_pc=4.8422,
    pa_sxc=4.8077,
)


def zincblende(parameters: Parameters, lattice_constant_angstrom: float) -> NoTBModel:
    """A zincblende crystal: ten orbitals, five on the anion and then five on the cation."""
    lat = lattice_constant_angstrom / 2 * np.array([[0.0, 1, 1], [1, 0, 1], [1, 1, 0]])
    p = parameters
    home = np.diag([p.s_a, p.p_a, p.p_a, p.p_a, p.sx_a, p.s_c, p.p_c, p.p_c, p.p_c, p.sx_c])
    hoppings: dict[LatticeVector, npt.NDArray[np.complex128]] = {HOME: home.astype(np.complex128)}
    # The cation sits at (1, 1, 1)/4 of the cube; the anion's other three neighbours lie in the cells -a1, -a2, -a3.
    bonds: list[tuple[LatticeVector, tuple[int, int, int]]] = [
        (HOME, (1, 1, 1)),
        ((-1, 0, 0), (1, -1, -1)),
        ((0, -1, 0), (-1, 1, -1)),
        ((0, 0, -1), (-1, -1, 1)),
    ]
    for cell, direction in bonds:
        block = np.zeros((10, 10), dtype=np.complex128)
        block[:5, 5:] = _bond(p, np.array(direction, dtype=np.float64))
        opposite: LatticeVector = (-cell[0], -cell[1], -cell[2])
        hoppings[cell] = hoppings.get(cell, 0) + block
        hoppings[opposite] = hoppings.get(opposite, 0) + block.conj().T
    sites = np.zeros((10, 3))
    sites[5:] = lattice_constant_angstrom / 4
    return orthogonal_model(lat, hoppings, sites)


def _bond(p: Parameters, direction: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Elements between an anion (rows) and the cation that lies in the direction (±1, ±1, ±1)."""
    block = np.zeros((5, 5))
    block[0, 0] = p.ss
    block[0, 1:4] = p.sa_pc * direction
    block[1:4, 0] = -p.pa_sc * direction
    block[1:4, 1:4] = p.xy * np.outer(direction, direction)
    block[range(1, 4), range(1, 4)] = p.xx
    block[4, 1:4] = p.sxa_pc * direction
    block[1:4, 4] = -p.pa_sxc * direction
    return block / 4


def gallium_arsenide() -> NoTBModel:
    """The demo's built-in crystal."""
    return zincblende(GALLIUM_ARSENIDE, LATTICE_CONSTANT_ANGSTROM)
