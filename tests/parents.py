"""Parents of the nodes of an operator, for trees that a test names."""


def chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(-1, num_nodes - 1))


def widths(*children: int) -> tuple[int, ...]:
    """A root, then breadth first `children[d]` nodes below each node of depth d."""
    parents, level = [-1], [0]
    for width in children:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return tuple(parents)
