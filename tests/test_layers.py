"""The tables of docs/architecture.md against the code: imports, third parties, state of modules, lengths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "onehop"
PAGE = ROOT / "docs" / "architecture.md"
LONGEST = 450

STANDARD = sys.stdlib_module_names | {"_sha2"}  # its names in other versions
FILES = sorted(SOURCE.rglob("*.py"))
MUTABLE_MAKERS = {
    "dict", "list", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "count", "cycle",
    "local", "Lock", "RLock", "Event", "Condition", "ContextVar", "WeakValueDictionary",
    "WeakKeyDictionary", "WeakSet", "SimpleQueue", "Queue",
}  # fmt: skip
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTATORS = {
    "append", "appendleft", "extend", "add", "update", "setdefault", "pop", "popleft", "popitem", "clear",
    "remove", "discard", "insert", "sort",
}  # fmt: skip


def name_of(path: Path) -> str:
    """`_memory.arena` for src/onehop/_memory/arena.py; a package's own file is the package's name."""
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in it, also for types only."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                # `from onehop import errors` imports a module, `from onehop.errors import X` a name
                inside = SOURCE.joinpath(*module.split(".")[1:], alias.name)
                is_module = module.split(".")[0] == "onehop" and (
                    inside.is_dir() or inside.with_suffix(".py").exists()
                )
                yield (f"{module}.{alias.name}" if is_module else module), node.lineno


def table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading of the page, without its head."""
    text = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


class Rule:
    """One row of the layers table."""

    def __init__(self, row: list[str]) -> None:
        self.layer, self.members, self.text = row[0], words(row[1]), row[2]
        self.each_other = "not each other" not in self.text
        self.by_name = words(self.text)
        self.public_only = "public names" in self.text
        self.anything = self.text.startswith("anything")
        self.layers: set[str] = set()
        if span := re.match(r"(\d)(?:–(\d))?", self.text):
            first, last = int(span[1]), int(span[2] or span[1])
            self.layers = {str(k) for k in range(first, last + 1)}


RULES = [Rule(row) for row in table("Layers")]
OWNER = {member: rule for rule in RULES for member in rule.members}


def unit_of(name: str) -> str:
    """The member of the table that a module (`_memory.arena`) belongs to."""
    return name.split(".")[0] or "__init__"


def test_every_part_is_in_the_table() -> None:
    parts = {unit_of(name_of(path)) for path in FILES}
    assert parts - set(OWNER) == set(), "these are missing in docs/architecture.md"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_layers(path: Path) -> None:
    here = unit_of(name_of(path))
    rule = OWNER[here]
    wrong = []
    for imported, line in imports_of(path):
        if imported.split(".")[0] != "onehop":
            continue
        name = imported.partition(".")[2] or "__init__"
        there = unit_of(name)
        if there == here or rule.anything:
            continue
        if rule.public_only:
            allowed = not any(
                part.startswith("_") and part != "__init__" for part in name.split(".")
            )
        elif there == "__init__":
            allowed = False
        elif OWNER[there] is rule:
            allowed = rule.each_other
        else:
            allowed = OWNER[there].layer in rule.layers or any(
                name == known or name.startswith(known + ".") for known in rule.by_name
            )
        if here == "__init__":
            allowed = OWNER[there].layer != "aside"  # re-exports
        if not allowed:
            wrong.append(f"line {line}: {imported} (layer {OWNER[there].layer})")
    assert not wrong, (
        f"{name_of(path)} is of layer {rule.layer}, which may import {rule.text}: {wrong}"
    )


def test_only_tests_import_the_kits() -> None:
    users = [
        name_of(path)
        for path in FILES
        if unit_of(name_of(path)) != "testing"
        and any(name.startswith("onehop.testing") for name, _ in imports_of(path))
    ]
    assert users == []


def test_third_parties_are_where_the_page_says() -> None:
    found: dict[str, set[str]] = {}
    for path in FILES:
        relative = path.relative_to(SOURCE).as_posix()
        place = "demo/" if relative.startswith("demo/") else relative
        for name, _ in imports_of(path):
            package = name.split(".")[0]
            if package not in STANDARD and package != "onehop":
                found.setdefault(package, set()).add(place)
    said = {words(row[0])[0]: set(words(row[1])) for row in table("Who may use what from outside")}
    assert found == said


def test_pickle_is_for_the_codec_alone() -> None:
    users = {
        unit_of(name_of(path))
        for path in FILES
        for name, _ in imports_of(path)
        if name.split(".")[0] in ("pickle", "_pickle", "marshal", "shelve", "copyreg")
    }
    # the demo pickles to show what a pool would have moved; nothing of it reads what came over a link
    assert users <= {"_codec", "demo"}


def called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def changing_names(path: Path) -> set[str]:
    """Names at module level that hold something that can change while the program runs."""
    tree = tree_of(path)
    bound: dict[str, ast.expr] = {}
    classes = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        # what holds its state per thread or per instance is state; an enum, an error or a record is not
        and any(isinstance(sub, ast.Assign | ast.AnnAssign) for sub in node.body)
        and not any(
            word in ast.dump(base)
            for base in [*node.bases, *node.decorator_list]
            for word in (
                "Enum",
                "Error",
                "Struct",
                "NamedTuple",
                "Protocol",
                "dataclass",
                "Structure",
            )
        )
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            if isinstance(node.targets[0], ast.Name):
                bound[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            bound[node.target.id] = node.value
    found = set()
    written = set()
    for inner in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(inner, ast.Global):
            found.update(inner.names)
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if inner.func.attr in MUTATORS:
                target = inner.func.value
        elif isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store | ast.Del):
            target = inner.value
        if isinstance(target, ast.Name):
            written.add(target.id)
    for name, value in bound.items():
        made = isinstance(value, ast.Call) and called_name(value) in MUTABLE_MAKERS | classes
        # a table that nobody writes is a constant
        if made or (name in written and isinstance(value, DISPLAYS)):
            found.add(name)
    return {f"{name_of(path)}.{name}" for name in found if name != "__all__"}


def test_modules_hold_no_state_but_what_the_page_explains() -> None:
    found = {name for path in FILES for name in changing_names(path)}
    said = {words(row[0])[0]: row[1] for row in table("State of a module")}
    assert found == set(said)
    assert all(len(reason) > 20 for reason in said.values())


def test_user_code_runs_in_one_file() -> None:
    """A call with both `*` and `**` of names that came over a link is how a user's function is called."""
    places = set()
    for path in FILES:
        if unit_of(name_of(path)) not in ("_runtime", "engines", "_links", "_memory", "_protocol"):
            continue
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and any(isinstance(arg, ast.Starred) for arg in node.args)
                and any(keyword.arg is None for keyword in node.keywords)
            ):
                places.add(name_of(path))
    assert places <= {"_runtime.executor"}


def test_blobs_cross_in_one_file() -> None:
    places = set()
    for path in FILES:
        if unit_of(name_of(path)) in ("_memory", "testing"):
            continue
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("attach", "place")
            ):
                places.add(name_of(path))
    assert places <= {"_runtime.transfers"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heads_and_lengths(path: Path) -> None:
    text = path.read_text()
    if not text.strip():
        return
    head = ast.get_docstring(tree_of(path)) or ""
    assert head, "a file opens with its purpose and what it must never know"
    length = text.count("\n")
    if length > LONGEST:
        assert re.search(r"\blong(er)?\b", head, re.IGNORECASE), (
            f"{length} lines: say at its head why it is long, or cut it"
        )
    assert not re.search(r"(util|helper|manager|handler)s?$", path.stem)


def test_a_worker_starts_without_heavy_modules() -> None:
    heavy = (
        "numpy scipy networkx psutil rich cloudpickle asyncio logging multiprocessing matplotlib pandas "
        "subprocess tempfile concurrent.futures dataclasses"
    )
    code = (
        "import sys, onehop._runtime.entry; "
        f"print(' '.join(m for m in {heavy.split()!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == []


def test_the_package_imports_no_optional_thing() -> None:
    code = "import sys, onehop; print([m for m in ('numpy', 'scipy', 'rich', 'networkx', 'matplotlib') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
