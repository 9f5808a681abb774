"""Random graphs, and all plans of a small one."""

import itertools
import math
import random

from lightning_egeria.methods.pipelining.decomposition import is_contiguous
from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node


def node(name, generator, sizes=True):
    """One whose backward takes twice as long as its forward."""
    seconds = generator.randint(1, 5)
    return Node(str(name), seconds, 2 * seconds, generator.randint(0, 4) * sizes, generator.randint(0, 6) * sizes)


def random_graph(seed, most=8):
    """Any directed graph without circles, of 2 to ``most`` nodes."""
    generator = random.Random(seed)
    count = generator.randint(2, most)
    density = generator.choice([0.15, 0.3, 0.5])
    pairs = itertools.combinations(range(count), 2)
    edges = tuple(pair for pair in pairs if generator.random() < density)
    return ComputationGraph(tuple(node(number, generator) for number in range(count)), edges)


def series_parallel(seed, most=8):
    """One that is made of series and parallels."""
    generator = random.Random(seed)
    count = generator.randint(2, most)
    edges = []

    def build(numbers, series):
        """Returns sources and sinks."""
        if len(numbers) == 1:
            return numbers, numbers
        cut = generator.randint(1, len(numbers) - 1)
        (first_in, first_out), (second_in, second_out) = (
            build(part, generator.random() < 0.5) for part in (numbers[:cut], numbers[cut:])
        )
        if not series:
            return first_in + second_in, first_out + second_out
        edges.extend(itertools.product(first_out, second_in))
        return first_in, second_out

    build(list(range(count)), True)
    return ComputationGraph(tuple(node(number, generator) for number in range(count)), tuple(sorted(edges)))


def branches(count, length=1, seconds=(0.02, 0.04)):
    """A stem, branches of a length, and an end that reads all of them."""
    names = ["stem", *(f"branch{branch}.{place}" for branch in range(count) for place in range(length)), "end"]
    edges = []
    for branch in range(count):
        inside = [1 + branch * length + place for place in range(length)]
        edges += [(0, inside[0]), *itertools.pairwise(inside), (inside[-1], len(names) - 1)]
    return ComputationGraph(tuple(Node(name, *seconds) for name in names), tuple(edges))


def partitions(items):
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    first, *others = items
    for groups in partitions(others):
        yield [[first], *groups]
        for number, group in enumerate(groups):
            yield [*groups[:number], [first, *group], *groups[number + 1 :]]


def best_of_all(graph, decomposition, limits, only_contiguous=True):
    """Slowest stage and micro-batches in flight of the best plan, found by trying all; None if none fits."""
    order = {pair for pair in itertools.combinations(range(len(graph.nodes)), 2) if graph.is_before(*pair)}
    order |= set(decomposition.serialised) if only_contiguous else set()
    best = None
    for groups in partitions(list(range(len(graph.nodes)))):
        if len(groups) > limits.devices:
            continue
        if only_contiguous and not all(is_contiguous(decomposition.tree, tuple(group)) for group in groups):
            continue
        home = {number: place for place, group in enumerate(groups) for number in group}
        waits = [{home[b] for a, b in order if home[a] == place} - {place} for place in range(len(groups))]
        if has_circle(waits):
            continue
        for widths in itertools.product(range(1, limits.devices + 1), repeat=len(groups)):
            if sum(widths) > limits.devices or max(widths) > min(limits.micro_batches, limits.max_width or 99):
                continue
            cost = _cost(graph, groups, widths, waits, limits)
            if cost is not None and (best is None or cost < best):
                best = cost
    return best


def has_circle(waits):
    left = set(range(len(waits)))
    while left:
        free = {place for place in left if not waits[place] & left}
        if not free:
            return True
        left -= free
    return False


def _cost(graph, groups, widths, waits, limits):
    flying = {}

    def in_flight(place):
        if place not in flying:
            behind = max((in_flight(other) for other in waits[place]), default=0)
            flying[place] = behind + limits.group * widths[place]
        return flying[place]

    slowest = 0
    for place, group in enumerate(groups):
        nodes = [graph.nodes[number] for number in group]
        share = math.ceil(limits.micro_batches / widths[place])
        slowest = max(slowest, sum(one.seconds for one in nodes) * share / limits.micro_batches)
        kept = math.ceil(min(in_flight(place), limits.micro_batches) / widths[place])
        needed = sum(one.parameter_bytes for one in nodes) + kept * sum(one.activation_bytes for one in nodes)
        if limits.memory_bytes is not None and needed > limits.memory_bytes:
            return None
    return slowest, max(in_flight(place) for place in range(len(groups)))
