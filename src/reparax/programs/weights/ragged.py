"""Products of factors along rows in groups, each with its group's part (ragged or grouped matrix products, as in MoE).

Which row is in which group is a factor of zeros and ones (``segments``). It is never multiplied with another factor: an
index of a group stands for the rows in it wherever rows and groups meet, in as many pairs of factors as there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from reparax.programs.weights.pairs import How, Labels, dot_numbers, lay_along, multiply_pair, sum_except
from reparax.programs.weights.segments import Segments
from reparax.programs.weights.sums import Factor, Label


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
    def of(cls, segments: Factor, out_labels: Labels) -> "Link":
        """The link by a factor that says which row is in which group, in a product that keeps these labels."""
        *_, rows, group = segments.labels
        return cls(rows, group, rows in out_labels)

    def spans(self, loop_labels: Labels, keep: Labels) -> tuple[Labels, Labels]:
        """The labels over which a product of factors with these labels runs, and those that stay."""
        group = frozenset([self.group])
        if not self.is_kept:
            return loop_labels, (loop_labels | group if self.sums(loop_labels, keep) else loop_labels) & (keep | group)
        if self.rows in loop_labels:
            return loop_labels - group, (loop_labels - group) & keep
        return loop_labels, loop_labels & (keep | group)

    def sums(self, loop_labels: Labels, keep: Labels) -> bool:
        """Whether a product sums the rows of each group."""
        return not self.is_kept and self.rows in loop_labels and self.rows not in keep


def split_off_segments(factors: Sequence[Factor], out_labels: Labels) -> tuple[list[Factor], Factor | None]:
    """The factors that are multiplied in pairs, and the one that says which row is in which group, if there is one."""
    found = [factor for factor in factors if isinstance(factor.array, Segments)]
    if not found:
        return list(factors), None
    (segments,) = found
    other_factors = [factor for factor in factors if factor is not segments]
    *batch_labels, rows, group = segments.labels
    other_labels = frozenset(label for factor in other_factors for label in factor.labels)
    if group not in out_labels | other_labels:  # all groups have the same part
        return [*other_factors, Factor(segments.array.inside(), (*batch_labels, rows), still=True)], None
    # Without a factor that has the rows no pair would bring rows and groups together.
    return (
        (other_factors, segments)
        if rows in other_labels and (rows in out_labels) != (group in out_labels)
        else (list(factors), None)
    )


def multiply_pair_in_groups(
    a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, out_labels: Labels
) -> Factor:
    """The product of two factors, summed over labels that are not wanted, in a product that keeps these labels."""
    link, loop_labels = Link.of(segments, out_labels), frozenset(a.labels + b.labels)
    _, result_labels = link.spans(loop_labels, keep)
    if link.sums(loop_labels, keep):
        return _sum_rows_of_each_group(a, b, result_labels, how, segments, link)
    for x, y in ((a, b), (b, a)):
        if link.is_kept and link.rows in x.labels and link.group in y.labels:
            return _multiply_by_parts(x, y, result_labels, how, segments, link)
    return multiply_pair(a, b, result_labels, how)


def _multiply_by_parts(a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, link: Link) -> Factor:
    """The product of rows with the parts of their groups."""
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels, [link.group]))
    common = [label for label in a.labels if label in b.labels]
    contracting, batch = ([x for x in common if (x in keep) is flag] for flag in (False, True))
    batch_labels, groups = segments.labels[:-2], segments.array
    if not contracting or not set(batch_labels) <= set(a.labels):
        return multiply_pair(a, _part_of_each_row(b, segments, how), keep, how)
    outer_labels = [label for label in batch_labels if label not in batch]
    inner_labels = [label for label in a.labels if label not in (*common, *outer_labels, link.rows)]
    labels = (*batch, *outer_labels, link.rows, *inner_labels, *contracting)
    sizes = groups.sizes
    if batch_labels:
        size_labels = (*batch, *outer_labels, link.group)
        sizes = jnp.broadcast_to(
            lay_along(sizes, (*batch_labels, link.group), size_labels), [label.size for label in size_labels]
        )
    array = _ragged_dot(
        lay_along(a.dense, a.labels, labels),
        b.dense,
        sizes,
        how,
        lax.RaggedDotDimensionNumbers(
            dot_numbers(labels, b.labels, contracting, batch), [labels.index(link.rows)], [b.labels.index(link.group)]
        ),
    )
    b_labels = (label for label in b.labels if label not in (*common, link.group))
    return Factor(array, (*batch, *outer_labels, link.rows, *inner_labels, *b_labels), a.still and b.still)


def _part_of_each_row(parts: Factor, segments: Factor, how: How) -> Factor:
    """``parts`` with its group axis gathered to rows: row r holds the part of r's group, or zeros beyond all groups."""
    *batch_labels, rows, group = segments.labels
    if batch_labels:
        keep = frozenset([*segments.labels, *parts.labels]) - {group}
        return multiply_pair(replace(segments, array=segments.dense), parts, keep, how)
    axis = parts.labels.index(group)
    array = jnp.take(parts.dense, segments.array.group_of_row(), axis=axis, mode="fill", fill_value=0)
    return replace(parts, array=array, labels=(*parts.labels[:axis], rows, *parts.labels[axis + 1 :]))


def _sum_rows_of_each_group(a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, link: Link) -> Factor:
    """The product of two factors, summed over the rows of each group; the labels ``keep`` are not summed."""
    if len(segments.labels) > 2 or link.rows not in a.labels or link.rows not in b.labels:
        # ``ragged_dot_general`` takes rows of both, and groups that are the same for all of a batch.
        with_rows, other = (a, b) if link.rows in a.labels else (b, a)
        dense = replace(segments, array=segments.dense)
        return multiply_pair(multiply_pair(with_rows, dense, keep.union(other.labels), how), other, keep, how)
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    common = [label for label in a.labels if label in b.labels]
    contracting, batch = ([x for x in common if (x in keep) is flag] for flag in (False, True))
    contracting = [link.rows, *(label for label in contracting if label is not link.rows)]
    numbers = lax.RaggedDotDimensionNumbers(
        dot_numbers(a.labels, b.labels, contracting, batch), [a.labels.index(link.rows)], []
    )
    array = _ragged_dot(a.dense, b.dense, segments.array.sizes, how, numbers)
    free = [[label for label in factor.labels if label not in common] for factor in (a, b)]
    return Factor(array, (link.group, *batch, *free[0], *free[1]), a.still and b.still)


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
