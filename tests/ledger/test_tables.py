"""Tables as people read them: text, HTML, rich."""

import html.parser
import io
import subprocess
import sys

import pytest
import rich.console

from onehop.ledger import Book, Flow, Ledger, Table, Tally, Traffic, format_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (800_000_000, "800.0 MB"),
        (5 * 10**18, "5000.0 PB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_text_is_aligned() -> None:
    table = Table(["name", ">size"], [["a", "1 B"], ["longer\nname", "12 B"]], "title", "footer")
    assert str(table).splitlines() == [
        "title",
        "name         size",
        "───────────  ────",
        "a             1 B",
        "longer name  12 B",
        "footer",
    ]
    assert "(nothing)" in str(Table(["name"], []))


class _Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_is_escaped() -> None:
    evil = "<script>alert('x')</script>&"
    ledger = Ledger(Book(), host_of=lambda rank: evil)
    ledger._book.note("call", (1, 1), None, 1, 2, evil, "moved", 1, 5, 0, 0, evil, evil)
    for shown in (
        ledger,
        ledger.between_hosts(),
        ledger.journey((1, 1)),
        Table([evil], [[evil]], evil, evil),
    ):
        text = shown._repr_html_()
        parser = _Cells()
        parser.feed(text)
        assert "script" not in parser.tags
        assert any(evil in cell for cell in parser.texts)


def test_rich_shows_names_and_not_markup() -> None:
    traffic = Traffic({("[red]a", "b"): Flow({("unix", "moved"): Tally(1, 1, 10)})})
    stream = io.StringIO()
    rich.console.Console(file=stream, width=100).print(traffic, Ledger(Book()))
    assert "[red]a" in stream.getvalue()
    assert "10 B" in stream.getvalue()


def test_text_needs_no_rich() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from onehop.ledger import Book, Ledger\n"
        "ledger = Ledger(Book()); ledger._book.note('call', (1, 1), None, 1, 2, 'unix', 'moved', 1, 5, 0, 0)\n"
        "print(ledger, ledger.between_hosts(), ledger.journey((1, 1)), ledger.between_processes()[1, 2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "1 → 2" in done.stdout
    assert "5 B moved (unix)" in done.stdout
