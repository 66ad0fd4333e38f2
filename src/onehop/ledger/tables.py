"""Tables of traffic: as text, as HTML for notebooks, and for rich where it is installed.

Must never read a ledger or know where the figures come from. Rich is imported only when rich itself asks for its form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from onehop.ledger.records import ATTACHED, AVOIDED, MOVED, OUTCOMES, Tally

if TYPE_CHECKING:
    import rich.table

End = TypeVar("End", int, str)


def format_bytes(size_bytes: int) -> str:
    """Write a size with three or four figures, in decimal units, and 0 as 0."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes} B" if size_bytes else "0"
    size = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size /= 1000
        # 999.95 would be written as 1000.0
        if abs(size) < 999.95 or unit == "PB":
            return f"{size:.1f} {unit}"
    raise AssertionError("the last unit takes every size")


class Table:
    """Rows of text under a heading.

    Parameters
    ----------
    columns : sequence of str
        Headings; one that begins with ``>`` has its column aligned to the right.
    rows : sequence of sequences of str
        The cells.
    title, footer : str
        Lines above and below.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        title: str = "",
        footer: str = "",
    ) -> None:
        self.columns = [column.lstrip(">") for column in columns]
        self.to_right = [column.startswith(">") for column in columns]
        self.rows = [[str(cell) for cell in row] for row in rows]
        self.title = title
        self.footer = footer

    def __str__(self) -> str:
        # A name with a line break must not tear the table.
        cells = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        widths = [
            max(len(heading), *(len(row[i]) for row in cells)) if cells else len(heading)
            for i, heading in enumerate(self.columns)
        ]

        def line(row: Sequence[str]) -> str:
            return "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self.to_right, strict=True)
            ).rstrip()

        lines = [self.title] if self.title else []
        lines += [line(self.columns), line(["─" * width for width in widths])]
        lines += [line(row) for row in cells]
        if not cells:
            lines.append("(nothing)")
        if self.footer:
            lines.append(self.footer)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        def cells(row: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align:{"right" if right else "left"}">{escape(cell)}</{tag}>'
                for cell, right in zip(row, self.to_right, strict=True)
            )

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = f"<thead><tr>{cells(self.columns, 'th')}</tr></thead>"
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        foot = f"<p>{escape(self.footer)}</p>" if self.footer else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{foot}"

    def __rich__(self) -> rich.table.Table:
        """Give rich its own kind of table; called by rich when it prints this."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, caption=self.footer or None)
        for column, right in zip(self.columns, self.to_right, strict=True):
            table.add_column(column, justify="right" if right else "left")
        for row in self.rows:
            # Text, because a function named "[red]" is not markup.
            table.add_row(*(Text(cell) for cell in row))
        return table


class Flow(Mapping[tuple[str, str], int]):
    """What went from one end to another: bytes by medium and outcome."""

    __slots__ = ("tallies",)

    def __init__(self, tallies: Mapping[tuple[str, str], Tally]) -> None:
        self.tallies = dict(tallies)

    def __getitem__(self, key: tuple[str, str]) -> int:
        return self.tallies[key].size_bytes

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.tallies)

    def __len__(self) -> int:
        return len(self.tallies)

    def total(self, outcome: str | None = None, medium: str | None = None) -> int:
        """Bytes with that outcome over that medium; None stands for any."""
        return sum(
            tally.size_bytes
            for (by, how), tally in self.tallies.items()
            if outcome in (None, how) and medium in (None, by)
        )

    def count(self, outcome: str | None = None, medium: str | None = None) -> int:
        """Payloads with that outcome over that medium; None stands for any."""
        return sum(
            tally.count
            for (by, how), tally in self.tallies.items()
            if outcome in (None, how) and medium in (None, by)
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that went over."""
        return self.total(MOVED)

    @property
    def attached_bytes(self) -> int:
        """Bytes that were mapped instead of copied."""
        return self.total(ATTACHED)

    @property
    def avoided_bytes(self) -> int:
        """Bytes that were there already."""
        return self.total(AVOIDED)

    def __repr__(self) -> str:
        parts = [f"{format_bytes(size)} {how} ({by})" for (by, how), size in sorted(self.items())]
        return ", ".join(parts) or "nothing"


class Traffic(Mapping[tuple[End, End], Flow], Generic[End]):
    """Who sent how much to whom: a mapping from (source, target) to `Flow`, that prints as a table."""

    def __init__(self, flows: Mapping[tuple[End, End], Flow], footer: str = "") -> None:
        self._flows: dict[tuple[End, End], Flow] = {pair: flows[pair] for pair in sorted(flows)}
        self._footer = footer

    def __getitem__(self, pair: tuple[End, End]) -> Flow:
        return self._flows[pair]

    def __iter__(self) -> Iterator[tuple[End, End]]:
        return iter(self._flows)

    def __len__(self) -> int:
        return len(self._flows)

    def total(self, outcome: str | None = None, medium: str | None = None) -> int:
        """Bytes between all pairs."""
        return sum(flow.total(outcome, medium) for flow in self._flows.values())

    def table(self) -> Table:
        """One row for each pair and medium."""
        rows: list[list[str]] = []
        for (source, target), flow in self._flows.items():
            for medium in sorted({by for by, _ in flow}):
                row = [str(source), str(target), medium, str(flow.count(medium=medium))]
                row += [format_bytes(flow.total(outcome, medium)) for outcome in OUTCOMES]
                rows += [row]
        return Table(
            ["from", "to", "medium", ">count", ">moved", ">attached", ">avoided"],
            rows,
            footer=self._footer,
        )

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> rich.table.Table:
        """Give rich its own kind of table."""
        return self.table().__rich__()
