"""Shows what the demo found: one table, JSON, a picture.

The only file of the demo that imports matplotlib. Must never compute anything of the physics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onehop.demo.job import Outcome
from onehop.demo.spectrum import resolution_ev

if TYPE_CHECKING:
    from rich.table import Table


def size_text(size_bytes: int | None) -> str:
    """A number of bytes for people, in decimal units."""
    if size_bytes is None:
        return "not known here"
    if size_bytes < 1000:
        return f"{size_bytes} B"
    units = ["kB", "MB", "GB", "TB"]
    value = size_bytes / 1000
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def table(outcome: Outcome) -> Table:
    """The one table."""
    from rich import box
    from rich.table import Table

    plan = outcome.plan
    count = plan.kpoints[0] * plan.kpoints[1] * plan.kpoints[2]
    result = Table(
        box=box.SIMPLE_HEAD,
        title=(
            f"{plan.source}, {outcome.repeat}×{outcome.repeat}×{outcome.repeat} cells: "
            f"{outcome.orbitals:,} orbitals, {outcome.matrices} sparse matrices, "
            f"{size_text(outcome.size_bytes)}; {count} k-points, {plan.workers} workers"
        ),
        caption=_caption(outcome),
        caption_justify="left",
        title_justify="left",
    )
    result.add_column("", no_wrap=True)
    result.add_column("serial", justify="right")
    for way in outcome.ways:
        result.add_column(way.name, justify="right")

    def row(title: str, serial: str, cells: list[str]) -> None:
        result.add_row(title, serial, *cells)

    row("time", f"{outcome.serial_s:.1f} s", [f"{way.time_s:.1f} s" for way in outcome.ways])
    row("pool would pickle", "", [size_text(way.pool_bytes) for way in outcome.ways])
    row("moved", "", [size_text(way.moved_bytes) for way in outcome.ways])
    row("attached", "", [size_text(way.attached_bytes) for way in outcome.ways])
    row("avoided", "", [size_text(way.avoided_bytes) for way in outcome.ways])
    row(
        "extra memory",
        size_text(outcome.serial_extra_bytes),
        [size_text(way.extra_bytes) for way in outcome.ways],
    )
    row("off serial by", "", [f"{way.difference:.0e}" for way in outcome.ways])
    result.add_section()
    row("nested call", "", [outcome.route] + [""] * (len(outcome.ways) - 1))
    return result


def _caption(outcome: Outcome) -> str:
    lines = [
        "pool would pickle: what a process pool writes, one task's pickle times the tasks",
        "moved: copied once, by anyone to anywhere · attached: mapped, nothing copied · avoided: was already there",
        "extra memory: peak of all processes above the model itself and idle workers; the tasks' own arrays are part of it (serial: of one task)",
        f"changed: {size_text(outcome.changed_bytes)} of one hopping matrix, in place; a stale model would be wrong "
        f"by {outcome.change_effect:.0e} (its serial run: {outcome.serial_changed_s:.1f} s)",
    ]
    if outcome.deviation is not None:
        lines.append(
            f"density of states: within {100 * outcome.deviation:.2g} % of its peak of the exact bands of one cell, "
            f"resolution {resolution_ev(outcome.recipe):.2f} eV"
        )
    lines.append(
        f"model built in {outcome.build_s:.1f} s, workers ready in {outcome.start_s:.1f} s"
    )
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same as plain data; sizes in bytes, times in seconds, energies in eV."""
    return {
        "source": outcome.plan.source,
        "supercell": outcome.repeat,
        "workers": outcome.plan.workers,
        "kpoints": list(outcome.plan.kpoints),
        "orbitals": outcome.orbitals,
        "matrices": outcome.matrices,
        "size_bytes": outcome.size_bytes,
        "changed_bytes": outcome.changed_bytes,
        "build_s": outcome.build_s,
        "start_s": outcome.start_s,
        "serial_s": outcome.serial_s,
        "serial_changed_s": outcome.serial_changed_s,
        "change_effect": outcome.change_effect,
        "ways": [vars(way) for way in outcome.ways],
        "route": outcome.route,
        "failures": outcome.failures,
        "density_of_states": {
            "energies_ev": outcome.energies_ev.tolist(),
            "states_per_ev_and_cell": outcome.density.tolist(),
            "resolution_ev": resolution_ev(outcome.recipe),
            "deviation_from_exact_bands": outcome.deviation,
        },
    }


def plot(outcome: Outcome, path: str) -> None:
    """Draw the density of states."""
    # The object interface: pyplot would choose a window system and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(outcome.energies_ev, outcome.density, alpha=0.3)
    axes.plot(
        outcome.energies_ev,
        outcome.density,
        label=f"{outcome.repeat}×{outcome.repeat}×{outcome.repeat} cells, on the cluster",
    )
    if outcome.exact_density is not None:
        axes.plot(
            outcome.energies_ev,
            outcome.exact_density,
            "k--",
            linewidth=0.8,
            label="exact bands of one cell, same resolution",
        )
    axes.set_xlabel("energy (eV)")
    axes.set_ylabel("states per eV and cell")
    axes.set_title(f"{outcome.plan.source}: density of states")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
