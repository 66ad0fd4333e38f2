"""Makes a model as large as wanted: N×N×N unit cells become one.

The physics does not change, the matrices do: N³ times as many orbitals. Must never know what the orbitals are.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from scipy import sparse

from onehop.demo.model import HOME, LatticeVector, NoTBModel, reciprocal

IntArray = npt.NDArray[np.int64]


def supercell(model: NoTBModel, repeat: int) -> NoTBModel:
    """Build the N×N×N supercell of a model.

    Cells are numbered with the third lattice direction fastest, the orbitals of one cell stay together.

    Parameters
    ----------
    model : NoTBModel
        Any model; it is not changed.
    repeat : int
        N, at least 1.
    """
    if repeat < 1:
        raise ValueError(f"a supercell needs at least 1 cell in each direction, not {repeat}")
    cells = np.stack(np.meshgrid(*[np.arange(repeat)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    positions: dict[LatticeVector, list[sparse.csr_matrix]] = {}
    for axis in range(3):
        flat = {vector: three[axis] for vector, three in model.positions.items()}
        for vector, matrix in _repeat(flat, model.norbits, repeat, cells).items():
            positions.setdefault(vector, []).append(matrix)
    overlaps = _repeat(model.overlaps, model.norbits, repeat, cells)
    _move_to_cells(positions, overlaps, np.repeat(cells @ model.lat.T, model.norbits, axis=0))
    lat = model.lat * repeat
    return NoTBModel(
        norbits=model.norbits * repeat**3,
        lat=lat,
        rlat=reciprocal(lat),
        hoppings=_repeat(model.hoppings, model.norbits, repeat, cells),
        overlaps=overlaps,
        positions=positions,
    )


def size_of_supercell_bytes(model: NoTBModel, repeat: int) -> int:
    """About how large the N×N×N supercell is; nothing is built."""
    # Positions of a supercell are nowhere zero where orbitals overlap, whatever they were in the unit cell.
    overlaps = sum(matrix.nnz for matrix in model.overlaps.values())
    elements = sum(matrix.nnz for matrix in model.hoppings.values()) + overlaps
    for axis in range(3):
        elements += max(overlaps, sum(three[axis].nnz for three in model.positions.values()))
    # 16 bytes of value and 4 of column index per element; 4 per row of each matrix, whose number is that of the
    # neighbouring supercells that hoppings reach, taken as those of the unit cell up to 27.
    matrices = min(len(model.hoppings), 27) + 4
    return int((20 * elements + 4 * model.norbits * matrices) * repeat**3)


def repeat_for_size(model: NoTBModel, size_bytes: int) -> int:
    """The largest N whose supercell is no larger than a size, at least 1; nothing is built."""
    repeat = 1
    while size_of_supercell_bytes(model, repeat + 1) <= size_bytes:
        repeat += 1
    return repeat


def _repeat(
    matrices: dict[LatticeVector, sparse.csr_matrix], norbits: int, repeat: int, cells: IntArray
) -> dict[LatticeVector, sparse.csr_matrix]:
    """Matrices of the supercell: row cell c and vector R lead to cell (c + R) mod N of supercell (c + R) div N."""
    size = norbits * repeat**3
    index_type = np.int32 if size < 2**31 else np.int64
    number_of = np.array([repeat * repeat, repeat, 1])
    rows_of_cells = (cells @ number_of * norbits).astype(index_type)
    parts = defaultdict(list)
    for vector, matrix in matrices.items():
        block = matrix.tocoo()
        shift, inside = np.divmod(cells + np.array(vector), repeat)
        columns_of_cells = (inside @ number_of * norbits).astype(index_type)
        kinds, kind_of_cell = np.unique(shift, axis=0, return_inverse=True)
        for number, kind in enumerate(kinds):
            here = np.flatnonzero(kind_of_cell.reshape(-1) == number)
            target: LatticeVector = (int(kind[0]), int(kind[1]), int(kind[2]))
            parts[target].append(
                (
                    np.add.outer(rows_of_cells[here], block.row.astype(index_type)).reshape(-1),
                    np.add.outer(columns_of_cells[here], block.col.astype(index_type)).reshape(-1),
                    np.tile(block.data, len(here)),
                )
            )
    result = {}
    for target in sorted(parts, key=lambda vector: (vector != HOME, vector)):
        rows, columns, values = (
            np.concatenate(pieces) for pieces in zip(*parts.pop(target), strict=True)
        )
        whole = sparse.coo_matrix((values, (rows, columns)), shape=(size, size)).tocsr()
        whole.sort_indices()
        result[target] = whole
    return result


def _move_to_cells(
    positions: dict[LatticeVector, list[sparse.csr_matrix]],
    overlaps: dict[LatticeVector, sparse.csr_matrix],
    origins: npt.NDArray[np.float64],
) -> None:
    """Add to ⟨0m|r|Rn⟩ the origin of the row's cell times the overlap: r was measured from that cell's origin."""
    for vector, overlap in overlaps.items():
        for axis in range(3):
            moved = sparse.diags(origins[:, axis]) @ overlap
            three = positions.setdefault(vector, [_empty(overlap) for _ in range(3)])
            three[axis] = (three[axis] + moved).tocsr()


def _empty(like: sparse.csr_matrix) -> sparse.csr_matrix:
    return sparse.csr_matrix(like.shape, dtype=np.complex128)
