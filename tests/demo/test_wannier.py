"""Reading ``_hr.dat`` files: two real ones, and every way in which one can be bad."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from onehop.demo.bloch import eigenvalues_ev
from onehop.demo.model import HOME
from onehop.demo.wannier import read_hr
from onehop.errors import FileFormatError

GOOD = """ made by hand
           2
           3
    1    2    2
    0    0    0    1    1   -1.000000    0.000000
    0    0    0    2    1    0.100000   -0.200000
    0    0    0    1    2    0.100000    0.200000
    0    0    0    2    2    1.500000    0.000000
    1    0    0    1    1    0.500000    0.000000
    1    0    0    2    1    0.000000    0.000000
    1    0    0    1    2    0.040000    0.000000
    1    0    0    2    2    0.000000    0.000000
   -1    0    0    1    1    0.500000    0.000000
   -1    0    0    2    1    0.040000    0.000000
   -1    0    0    1    2    0.000000    0.000000
   -1    0    0    2    2    0.000000    0.000000
"""


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "crystal_hr.dat"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def replace_line(number: int, new: str) -> str:
    lines = GOOD.splitlines()
    lines[number - 1] = new
    return "\n".join(lines) + "\n"


def test_a_small_file_gives_the_hamiltonian_of_the_format(tmp_path: Path) -> None:
    model = read_hr(write(tmp_path, GOOD))
    assert model.norbits == 2
    assert model.is_orthogonal
    k = 0.3
    wave = np.exp(2j * np.pi * k)
    expected = np.array(
        [
            [-1 + 0.5 / 2 * 2 * np.cos(2 * np.pi * k), 0.1 + 0.2j + 0.04 / 2 * wave],
            [0.1 - 0.2j + 0.04 / 2 / wave, 1.5],
        ]
    )
    assert eigenvalues_ev(model, (k, 0, 0)) == pytest.approx(np.linalg.eigvalsh(expected))


def test_windows_line_ends_and_blank_lines_at_the_end_are_fine(tmp_path: Path) -> None:
    model = read_hr(write(tmp_path, GOOD.replace("\n", "\r\n") + "\r\n\r\n"))
    assert len(model.hoppings) == 3


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "the file is empty"),
        ("\n \n\n", 1, "the file is empty"),
        (b"a comment\n\x89HDF\r\n\x1a\n\xff\xfe" + bytes(range(256)), 4, "not a text file"),
        (b"a comment\n2\n\xff\xfe\n", 3, "not a text file: byte 0xff"),
        ("only a comment\n", 1, "ends after this line, before the number of Wannier functions"),
        ("comment\n8\n", 2, "before the number of lattice vectors"),
        (replace_line(2, "two"), 2, "the number of Wannier functions must be an integer"),
        (replace_line(2, "2.0"), 2, "must be an integer, not '2.0'"),
        (replace_line(2, "2 3"), 2, "found 2 fields"),
        (replace_line(2, "0"), 2, "must be at least 1, not 0"),
        (replace_line(3, "-3"), 3, "must be at least 1, not -3"),
        (replace_line(4, "1 2"), 5, "degeneracy"),
        (replace_line(4, "1 2 2 2"), 4, "4 degeneracies, but line 3 announces 3"),
        (replace_line(4, "1 0 2"), 4, "degeneracy 2 must be at least 1, not 0"),
        (replace_line(4, "1 2.5 2"), 4, "degeneracy 2 must be an integer"),
        (replace_line(4, "1 2 3"), 9, "has degeneracy 2, its partner (-1, 0, 0) 3"),
        (replace_line(6, "0 0 0 2 1 0.1"), 6, "expected the 7 fields"),
        (replace_line(6, "0 0 0 2 1 nan 0.0"), 6, "Re is not finite: 'nan'"),
        (replace_line(6, "0 0 0 2 1 0.1 inf"), 6, "Im is not finite"),
        (replace_line(6, "0 0 0 2 1 0.1 ****"), 6, "Im must be a number, not '****'"),
        (replace_line(6, "0 0 0.5 2 1 0.1 0.0"), 6, "R3 must be an integer"),
        (replace_line(6, "0 0 0 3 1 0.1 0.0"), 6, "m must lie between 1 and 2, not 3"),
        (replace_line(6, "0 0 0 2 0 0.1 0.0"), 6, "n must lie between 1 and 2, not 0"),
        (replace_line(6, "0 0 0 1 1 0.1 0.0"), 6, "element (1, 1) of lattice vector (0, 0, 0) again"),
        (replace_line(6, "0 1 0 2 1 0.1 0.0"), 6, "lattice vector (0, 1, 0) among the 4 elements"),
        (replace_line(6, "0 0 0 2 1 0.1 0.2"), 5, "not Hermitian: element (1, 2)"),
        (GOOD.replace("-1    0    0", " 1    0    0"), 13, "lattice vector (1, 0, 0) again"),
        (GOOD.replace("-1    0    0", "-2    0    0"), 9, "no partner (-1, 0, 0)"),
        ("\n".join(GOOD.splitlines()[:12]), 12, "8 of 12 elements"),
        ("\n".join(GOOD.splitlines()[:10]), 10, "6 of 12 elements"),
        (GOOD + "0 0 0 1 1 0 0\n", 17, "but the file goes on"),
        (replace_line(3, "999999999999"), 5, "degeneracy"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_line_and_reason(
    tmp_path: Path, text: str | bytes, line: int, reason: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FileFormatError) as caught:
        read_hr(path)
    assert caught.value.line == line, str(caught.value)
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line, again.path) == (str(caught.value), line, str(path))


def test_a_header_that_announces_too_much_allocates_nothing(tmp_path: Path) -> None:
    # 10⁶ functions would be 16 TB for the first matrix alone.
    with pytest.raises(FileFormatError, match="of 1000000000000 elements"):
        read_hr(write(tmp_path, "comment\n1000000\n1\n1\n0 0 0 1 1 0 0\n"))


def test_a_file_that_is_absent_is_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_hr(tmp_path / "nowhere_hr.dat")


def test_real_silicon(data_folder: Path) -> None:
    model = read_hr(data_folder / "silicon_hr.dat")
    assert (model.norbits, len(model.hoppings)) == (8, 93)
    at_gamma = eigenvalues_ev(model, (0, 0, 0))
    # Γ25': the top of the valence bands, threefold; Γ15 above it, threefold.
    assert np.ptp(at_gamma[1:4]) < 1e-3
    assert at_gamma[1] - at_gamma[0] == pytest.approx(12.05, abs=0.1)
    # Silicon's gap is indirect: along Γ-X the lowest conduction band falls below its energy at Γ.
    along = [eigenvalues_ev(model, (x / 2, x / 2, 0))[4] for x in np.linspace(0, 1, 11)]
    assert min(along) < along[0] - 1
    assert min(along) > at_gamma[3]


def test_real_bismuth(data_folder: Path) -> None:
    model = read_hr(data_folder / "bi_hr.dat")
    assert (model.norbits, len(model.hoppings)) == (10, 267)
    # Inversion and time reversal: all levels come twice.
    levels = eigenvalues_ev(model, (0.2, 0.1, 0.3))
    assert levels[::2] == pytest.approx(levels[1::2], abs=2e-3)
    assert HOME in model.hoppings


def test_a_real_file_cut_anywhere_is_refused(data_folder: Path, tmp_path: Path) -> None:
    whole = (data_folder / "silicon_hr.dat").read_bytes()
    for size in (0, 10, 40, 500, 3000, len(whole) // 2, len(whole) - 70):
        with pytest.raises(FileFormatError):
            read_hr(write(tmp_path, whole[:size]))
