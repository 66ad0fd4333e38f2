"""The runtime of one process of a cluster: its loop, its transfers, its tasks."""
