"""Reads a Wannier90 ``seedname_hr.dat`` file, and says exactly what is wrong with a bad one.

The format (Wannier90 user guide): a comment line; the number n of Wannier functions; the number N of lattice vectors;
N degeneracies, 15 to a line; then N·n² lines ``R1 R2 R3 m n Re Im`` with energies in eV. The file holds neither the
lattice nor the centres of the functions. Must never know what becomes of the model.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onehop.demo.model import LatticeVector, NoTBModel, orthogonal_model
from onehop.errors import FileFormatError

HERMITIAN_TOLERANCE_EV = 1e-3
"""Files carry six decimals, and their Hamiltonians are Hermitian to no better than the interpolation behind them."""

Blocks = dict[LatticeVector, npt.NDArray[np.complex128]]


def read_hr(path: str | os.PathLike[str]) -> NoTBModel:
    """Read a model from a ``_hr.dat`` file.

    Lattice vectors are set to the unit vectors and all positions to zero, since the file does not tell them; neither
    matters for band energies and densities of states.

    Raises
    ------
    FileFormatError
        Naming file, line and reason.
    OSError
        If the file cannot be opened.
    """
    reader = _Reader(os.fspath(path), _text(Path(path)))
    reader.next_line("the comment line")
    functions = reader.count("the number of Wannier functions")
    vectors = reader.count("the number of lattice vectors")
    degeneracies = reader.degeneracies(vectors)
    blocks, starts = _blocks(reader, functions, vectors)
    _check_hermitian(reader, blocks, degeneracies, starts)
    weighted = {
        vector: block / degeneracy
        for (vector, block), degeneracy in zip(blocks.items(), degeneracies, strict=True)
    }
    return orthogonal_model(np.eye(3), weighted, np.zeros((functions, 3)))


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if not raw.strip():
        raise FileFormatError(str(path), 1, "the file is empty")
    nul = raw.find(b"\0")
    if nul >= 0:
        raise FileFormatError(
            str(path), raw.count(b"\n", 0, nul) + 1, f"not a text file: byte 0 at offset {nul}"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise FileFormatError(
            str(path),
            line,
            f"not a text file: byte 0x{raw[error.start]:02x} at offset {error.start}",
        ) from None


class _Reader:
    """The lines of one file, with the number of the current one for errors."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        # Not splitlines(): that also splits at form feeds and Unicode separators, and line numbers would be wrong.
        self._lines = text.rstrip().split("\n")
        self.number = 0

    @property
    def remaining(self) -> int:
        return len(self._lines) - self.number

    def error(self, reason: str, line: int | None = None) -> FileFormatError:
        return FileFormatError(self._path, self.number if line is None else line, reason)

    def next_line(self, wanted: str) -> str:
        if not self.remaining:
            raise self.error(f"the file ends after this line, before {wanted}")
        self.number += 1
        return self._lines[self.number - 1]

    def count(self, what: str) -> int:
        fields = self.next_line(what).split()
        if len(fields) != 1:
            raise self.error(f"expected {what} alone on the line, found {len(fields)} fields")
        value = self.integer(fields[0], what)
        if value < 1:
            raise self.error(f"{what} must be at least 1, not {value}")
        return value

    def integer(self, field: str, what: str) -> int:
        try:
            return int(field)
        except ValueError:
            raise self.error(f"{what} must be an integer, not {_shown(field)}") from None

    def real(self, field: str, what: str) -> float:
        try:
            value = float(field)
        except ValueError:
            raise self.error(f"{what} must be a number, not {_shown(field)}") from None
        if not math.isfinite(value):
            raise self.error(f"{what} is not finite: {_shown(field)}")
        return value

    def degeneracies(self, wanted: int) -> list[int]:
        found: list[int] = []
        while len(found) < wanted:
            for field in self.next_line(f"degeneracy {len(found) + 1} of {wanted}").split():
                value = self.integer(field, f"degeneracy {len(found) + 1}")
                if value < 1:
                    raise self.error(f"degeneracy {len(found) + 1} must be at least 1, not {value}")
                found.append(value)
        if len(found) > wanted:
            raise self.error(
                f"{len(found)} degeneracies, but line 3 announces {wanted} lattice vectors"
            )
        return found


def _shown(field: str) -> str:
    return repr(field if len(field) <= 24 else field[:24] + "…")


def _blocks(
    reader: _Reader, functions: int, vectors: int
) -> tuple[Blocks, dict[LatticeVector, int]]:
    """The matrix of each lattice vector, in the order of the file, and the line that it starts on."""
    per_block = functions * functions
    available = reader.remaining
    # Compared before anything is allocated: a damaged header may announce more than any memory holds.
    if available > vectors * per_block:
        reader.number += vectors * per_block + 1
        raise reader.error(
            f"{vectors} lattice vectors of {functions}×{functions} elements end before this line, but the file goes on"
        )
    blocks: Blocks = {}
    starts: dict[LatticeVector, int] = {}
    for _ in range(vectors):
        if reader.remaining < per_block:
            reader.number += reader.remaining
            raise _truncated(reader, functions, vectors, available)
        block = np.full((functions, functions), np.nan, dtype=np.complex128)
        vector: LatticeVector | None = None
        for _ in range(per_block):
            here, m, n, value = _element(reader, functions)
            if vector is None:
                vector = here
                if vector in blocks:
                    raise reader.error(
                        f"lattice vector {vector} again; it came first on line {starts[vector]}"
                    )
                starts[vector] = reader.number
            elif here != vector:
                raise reader.error(
                    f"lattice vector {here} among the {per_block} elements of {vector}, "
                    f"which start on line {starts[vector]}"
                )
            if not np.isnan(block[m - 1, n - 1].real):
                raise reader.error(f"element ({m}, {n}) of lattice vector {vector} again")
            block[m - 1, n - 1] = value
        assert vector is not None  # per_block is at least 1
        blocks[vector] = block
    return blocks, starts


def _truncated(reader: _Reader, functions: int, vectors: int, available: int) -> FileFormatError:
    return reader.error(
        f"the file ends after this line with {available} of {vectors * functions**2} elements "
        f"({vectors} lattice vectors of {functions}×{functions})"
    )


def _element(reader: _Reader, functions: int) -> tuple[LatticeVector, int, int, complex]:
    fields = reader.next_line("all matrix elements").split()
    if len(fields) != 7:
        raise reader.error(f"expected the 7 fields R1 R2 R3 m n Re Im, found {len(fields)}")
    names = ("R1", "R2", "R3", "m", "n")
    r1, r2, r3, m, n = (reader.integer(f, name) for f, name in zip(fields, names, strict=False))
    for name, index in (("m", m), ("n", n)):
        if not 1 <= index <= functions:
            raise reader.error(f"{name} must lie between 1 and {functions}, not {index}")
    value = complex(reader.real(fields[5], "Re"), reader.real(fields[6], "Im"))
    return (r1, r2, r3), m, n, value


def _check_hermitian(
    reader: _Reader, blocks: Blocks, degeneracies: list[int], starts: dict[LatticeVector, int]
) -> None:
    """H(-R) must be the adjoint of H(R), or energies would not be real."""
    weight = dict(zip(blocks, degeneracies, strict=True))
    for vector, block in blocks.items():
        opposite: LatticeVector = (-vector[0], -vector[1], -vector[2])
        if opposite not in blocks:
            raise reader.error(
                f"lattice vector {vector} has no partner {opposite}, so the Hamiltonian is not Hermitian",
                starts[vector],
            )
        if weight[opposite] != weight[vector]:
            raise reader.error(
                f"lattice vector {vector} has degeneracy {weight[vector]}, its partner {opposite} {weight[opposite]}",
                starts[vector],
            )
        difference = np.abs(block - blocks[opposite].conj().T)
        m, n = np.unravel_index(int(np.argmax(difference)), difference.shape)
        if difference[m, n] > HERMITIAN_TOLERANCE_EV:
            raise reader.error(
                f"not Hermitian: element ({m + 1}, {n + 1}) of lattice vector {vector} differs by "
                f"{difference[m, n]:.6f} eV from the conjugate of ({n + 1}, {m + 1}) of {opposite}",
                starts[vector],
            )
