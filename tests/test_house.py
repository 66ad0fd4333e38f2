"""What the pages say is so: the README's example runs, links lead somewhere, the decisions are listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import run_script

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "benchmarks" / "README.md",
]


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = [block for block in code_blocks(ROOT / "README.md", "python") if "half" in block]
    code = [line for line in example.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(code) <= 20
    finished = run_script(example.replace("1000, 1000", "200, 200"), tmp_path)
    first, second, changed, half, rank, *rest = finished.lines
    assert float(changed) == pytest.approx(float(second) + 100.0, abs=1.0)
    assert float(first) > float(half) / 1000
    assert rank == "3"
    assert rest[0].startswith("2 → 3")
    assert finished.err == ""


def test_the_example_in_its_file_is_the_same(tmp_path: Path) -> None:
    (block,) = [block for block in code_blocks(ROOT / "README.md", "python") if "half" in block]
    file = (ROOT / "examples" / "twenty_lines.py").read_text()

    def calls(text: str) -> list[str]:
        code = re.sub(r"#.*", "", text).replace(" ", "")
        return [line for line in code.splitlines() if line.startswith(("print", "half", "with"))]

    assert calls(block) == calls(file)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(tmp_path: Path, example: Path) -> None:
    text = example.read_text().replace("1000, 1000", "200, 200")
    assert run_script(text, tmp_path).out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text()
    for page in folder.glob("0*.md"):
        assert page.name in listed


def test_the_public_names_are_documented() -> None:
    import onehop

    for name in onehop.__all__:
        made = getattr(onehop, name)
        if callable(made):
            assert made.__doc__, f"onehop.{name} has no docstring"
            assert made.__module__.startswith("onehop"), name
