"""Band energies of a crystal over a grid of k-points, from a Wannier90 file: python wannier_dos.py seedname_hr.dat.

Needs the packages of the demo: pip install 'onehop[demo]'.
"""

import sys

import numpy as np

import onehop
from onehop.demo import bloch, vogl, wannier

model = wannier.read_hr(sys.argv[1]) if len(sys.argv) > 1 else vogl.gallium_arsenide()
kpoints = bloch.grid((8, 8, 8))

with onehop.Cluster(2) as cluster:
    # The lambda mentions the model: it travels once to this machine's workers, not with each of the 512 tasks.
    levels = list(cluster.map(lambda k: bloch.eigenvalues_ev(model, k), kpoints, progress=True))
    print(f"moved {cluster.ledger.total('moved') / 1e3:.0f} kB for {len(kpoints)} k-points")

energies = np.linspace(np.min(levels) - 1, np.max(levels) + 1, 40)
density = bloch.gaussian_dos(energies, levels, sigma_ev=0.3)
for energy, value in zip(energies, density, strict=True):
    print(f"{energy:8.2f} eV {'█' * round(50 * value / density.max())}")
