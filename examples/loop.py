"""An ordinary loop that passes a large array with every call: it moves once, and again only where it changed."""

import numpy as np

import onehop

table = np.random.default_rng(1).normal(size=(1000, 10_000))  # 80 MB


def score(data: np.ndarray, row: int) -> float:
    """What one task computes."""
    return float(data[row] @ data.mean(axis=0))


with onehop.Cluster(2) as cluster:
    for title in ("first time", "unchanged", "one number changed"):
        with cluster.ledger.watch() as traffic:
            futures = [cluster.submit(score, table, row) for row in range(20)]
            best = max(future.result() for future in futures)
        moved_mb = traffic.total("moved") / 1e6
        print(
            f"{title}: best {best:.3f}; moved {moved_mb:.2f} MB of {20 * table.nbytes / 1e6:.0f} MB passed"
        )
        if title == "unchanged":
            table[7, 0] += 100
