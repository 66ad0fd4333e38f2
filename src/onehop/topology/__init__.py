"""Which processes may have links, and the ways between all the others; pure."""

from onehop.topology.graph import Link, Member, Topology
from onehop.topology.routing import Route
from onehop.topology.shapes import Shape, all_to_all, custom, shape_of, star, tree

__all__ = [
    "Link",
    "Member",
    "Route",
    "Shape",
    "Topology",
    "all_to_all",
    "custom",
    "shape_of",
    "star",
    "tree",
]
