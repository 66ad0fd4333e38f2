"""`make bench`: every script in a process of its own, then one table of all figures."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

NAMES = [
    "unchanged_argument",
    "captured_array",
    "model_argument",
    "latency",
    "throughput",
    "start",
    "returned_array",
    "memory",
]


def main() -> int:
    arguments = sys.argv[1:]
    options = [word for word in arguments if word.startswith("-")]
    names = [word for word in arguments if not word.startswith("-")] or NAMES
    rows: list[tuple[str, str, str, str]] = []
    failed = False
    print(
        f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}",
        flush=True,
    )
    for name in names:
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--json", *options],
            stdout=subprocess.PIPE,
            text=True,
            timeout=1200,
        )
        if done.returncode:
            failed = True
            rows.append((name, "failed", "", ""))
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print("\n".join(found["notes"]), flush=True)
        for figure in found["figures"]:
            sign = "≤" if figure["better"] == "less" else "≥"
            rows.append(
                (
                    f"{name}: {figure['what']}",
                    f"{figure['value']:.3g} {figure['unit']}",
                    f"{sign} {figure['limit']:.3g} {figure['unit']}",
                    "yes" if figure["reached"] else "NO",
                )
            )
    print("\n| figure | measured | to reach | reached |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
