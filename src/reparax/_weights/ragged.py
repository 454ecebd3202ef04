"""Products of factors along rows that are in groups: each row meets the part of its own group.

Which row is in which group is a factor of zeros and ones (``segments``). It is never multiplied with another factor: an
index of a group stands for the rows in it wherever rows and groups meet, in as many pairs of factors as there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from reparax._weights.pairs import How, Labels, dot_numbers, lay_along, multiply_pair, sum_unwanted
from reparax._weights.segments import Segments
from reparax._weights.sums import Factor, Label


@dataclass(frozen=True)
class Link:
    """A label of rows and one of their groups.

    Attributes:
      rows: The label of the rows.
      group: The label of the groups.
      is_kept: Whether the rows stay, so that each finds the part of its group; else each group sums its rows.
    """

    rows: Label
    group: Label
    is_kept: bool

    @classmethod
    def of(cls, which: Factor, kept: Labels) -> "Link":
        """The link by a factor that says which row is in which group, in a product that keeps these labels."""
        *_, rows, group = which.labels
        return cls(rows, group, rows in kept)

    def spans(self, made: Labels, wanted: Labels) -> tuple[Labels, Labels]:
        """The labels over which a product of factors with the labels ``made`` runs, and those that stay."""
        group = frozenset([self.group])
        if not self.is_kept:
            return made, (made | group if self.sums(made, wanted) else made) & (wanted | group)
        if self.rows in made:
            return made - group, (made - group) & wanted
        return made, made & (wanted | group)

    def sums(self, made: Labels, wanted: Labels) -> bool:
        """Whether a product sums the rows of each group."""
        return not self.is_kept and self.rows in made and self.rows not in wanted


def split_off_segments(factors: Sequence[Factor], kept: Labels) -> tuple[list[Factor], Factor | None]:
    """The factors that are multiplied in pairs, and the one that says which row is in which group, if there is one."""
    found = [factor for factor in factors if isinstance(factor.array, Segments)]
    if not found:
        return list(factors), None
    (which,) = found
    rest = [factor for factor in factors if factor is not which]
    *before, rows, group = which.labels
    held = frozenset(label for factor in rest for label in factor.labels)
    if group not in kept | held:  # all groups have the same part
        return [*rest, Factor(which.array.inside(), (*before, rows), still=True)], None
    # Without a factor that has the rows no pair would bring rows and groups together.
    return (rest, which) if rows in held and (rows in kept) != (group in kept) else (list(factors), None)


def multiply_pair_in_groups(a: Factor, b: Factor, wanted: Labels, how: How, which: Factor, kept: Labels) -> Factor:
    """The product of two factors, summed over labels that are not wanted, in a product that keeps these labels."""
    link, made = Link.of(which, kept), frozenset(a.labels + b.labels)
    _, left = link.spans(made, wanted)
    if link.sums(made, wanted):
        return _sum_rows_of_each_group(a, b, left, how, which, link)
    for x, y in ((a, b), (b, a)):
        if link.is_kept and link.rows in x.labels and link.group in y.labels:
            return _multiply_by_parts(x, y, left, how, which, link)
    return multiply_pair(a, b, left, how)


def _multiply_by_parts(a: Factor, b: Factor, left: Labels, how: How, which: Factor, link: Link) -> Factor:
    """The product of rows with the parts of their groups."""
    a, b = sum_unwanted(a, left.union(b.labels)), sum_unwanted(b, left.union(a.labels, [link.group]))
    common = [label for label in a.labels if label in b.labels]
    summed, shared = ([x for x in common if (x in left) is flag] for flag in (False, True))
    before, groups = which.labels[:-2], which.array
    if not summed or not set(before) <= set(a.labels):
        return multiply_pair(a, _part_of_each_row(b, which, how, link), left, how)
    outer = [label for label in before if label not in shared]
    inner = [label for label in a.labels if label not in (*common, *outer, link.rows)]
    labels = (*shared, *outer, link.rows, *inner, *summed)
    sizes = groups.sizes
    if before:
        own = (*shared, *outer, link.group)
        sizes = jnp.broadcast_to(lay_along(sizes, (*before, link.group), own), [label.size for label in own])
    made = _ragged_dot(
        lay_along(a.whole, a.labels, labels),
        b.whole,
        sizes,
        how,
        lax.RaggedDotDimensionNumbers(
            dot_numbers(labels, b.labels, summed, shared), [labels.index(link.rows)], [b.labels.index(link.group)]
        ),
    )
    others = (label for label in b.labels if label not in (*common, link.group))
    return Factor(made, (*shared, *outer, link.rows, *inner, *others), a.still and b.still)


def _part_of_each_row(b: Factor, which: Factor, how: How, link: Link) -> Factor:
    """For each row the part of its group."""
    *before, rows, group = which.labels
    if before:
        return multiply_pair(replace(which, array=which.whole), b, frozenset([*which.labels, *b.labels]) - {group}, how)
    axis = b.labels.index(group)
    array = jnp.take(b.whole, which.array.numbers(), axis=axis, mode="fill", fill_value=0)
    return replace(b, array=array, labels=(*b.labels[:axis], rows, *b.labels[axis + 1 :]))


def _sum_rows_of_each_group(a: Factor, b: Factor, kept: Labels, how: How, groups: Factor, link: Link) -> Factor:
    """The product of two factors, summed over the rows of each group; the labels ``kept`` are not summed."""
    if len(groups.labels) > 2 or link.rows not in a.labels or link.rows not in b.labels:
        # ``ragged_dot_general`` takes rows of both, and groups that are the same for all of a batch.
        first, second = (a, b) if link.rows in a.labels else (b, a)
        dense = replace(groups, array=groups.whole)
        return multiply_pair(multiply_pair(first, dense, kept.union(second.labels), how), second, kept, how)
    a, b = sum_unwanted(a, kept.union(b.labels)), sum_unwanted(b, kept.union(a.labels))
    common = [label for label in a.labels if label in b.labels]
    summed, shared = ([x for x in common if (x in kept) is flag] for flag in (False, True))
    summed = [link.rows, *(label for label in summed if label is not link.rows)]
    numbers = lax.RaggedDotDimensionNumbers(
        dot_numbers(a.labels, b.labels, summed, shared), [a.labels.index(link.rows)], []
    )
    made = _ragged_dot(a.whole, b.whole, groups.array.sizes, how, numbers)
    own = [[label for label in each.labels if label not in common] for each in (a, b)]
    return Factor(made, (link.group, *shared, *own[0], *own[1]), a.still and b.still)


def _ragged_dot(x: Any, y: Any, sizes: Any, how: How, numbers: lax.RaggedDotDimensionNumbers) -> Any:
    """``jax.lax.ragged_dot_general``, with the dtypes and the precision of ``how``."""
    return lax.ragged_dot_general(
        x.astype(how.dtype),
        y.astype(how.dtype),
        sizes,
        numbers,
        precision=how.precision,
        preferred_element_type=how.result,
    )
