"""Decides which weights stay sums of products and which are formed, by the cost for the whole program."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn

from reparax.programs.weights.sums import Sum


@dataclass(frozen=True)
class SumRead:
    """One read of a sum.

    Attributes:
      eqn: The equation that reads; None for the result of a program or of a body.
      times: How often it runs.
      in_formula: Whether it is part of a parametrization, not of the network.
      cost_in_factors: The cost of a product with the factors; None if the read needs the array.
      cost_as_array: The cost of a product with the array.
    """

    eqn: JaxprEqn | None
    times: int
    in_formula: bool
    cost_in_factors: float | None = None
    cost_as_array: float = 0.0


@dataclass
class Record:
    """What a plan records about a sum.

    Attributes:
      eqn: The equation that made it.
      shape: Its shape.
      dtype: Its dtype.
      origins: The arguments on which it depends.
      parents: The sums from which it is made.
      cost_to_form: The cost to form it and its parents.
      times: How often it is made.
      reads: What reads it, except other sums made from it.
      is_formed: Whether it is formed where it is made.
      read_if_formed: How it reads its parents where it is formed; None if it needs their arrays.
    """

    eqn: JaxprEqn
    shape: tuple[int, ...]
    dtype: Any
    origins: frozenset[int]
    parents: Sequence[Hashable]
    cost_to_form: float
    times: int
    reads: list[SumRead] = field(default_factory=list)
    is_formed: bool = False
    read_if_formed: SumRead | None = None


class SumPlan:
    """Records what reads each sum in a first evaluation of a program, then decides which sums the second one forms.

    Attributes:
      records: The record of each sum, by its root.
      is_decided: Whether the decision is made. Nothing is recorded after that.
    """

    def __init__(self) -> None:
        self.records: dict[Hashable, Record] = {}
        self.is_decided = False

    def note(self, root: Hashable, record: Record) -> None:
        """Records a new sum."""
        self.records[root] = record

    def reads(self, x: Sum, read: SumRead) -> None:
        """Records a read of a sum."""
        if not self.is_decided:
            self.records[x.root].reads.append(read)

    def forms(self, root: Hashable) -> bool:
        """Whether a sum is formed where it is made; unrecorded sums, which only formed ones produce, are formed too."""
        return root not in self.records or self.records[root].is_formed

    def decide(self) -> None:
        """Decides for each sum, the last first, because a sum in factors needs its parents in factors too."""
        needed = set[Hashable]()
        for root, record in reversed(self.records.items()):
            cost_in_factors, cost_formed = self.costs(root)
            arrays = [read for read in record.reads if read.cost_in_factors is None]
            if root not in needed and (cost_formed < cost_in_factors or (arrays and cost_formed == cost_in_factors)):
                record.is_formed = True
                for parent in record.parents:
                    read = record.read_if_formed or SumRead(record.eqn, record.times, in_formula=True)
                    self.records[parent].reads.append(read)
            elif root in needed or record.reads:
                needed.update(record.parents)
        self.is_decided = True

    def costs(self, root: Hashable) -> tuple[float, float]:
        """The cost of all reads of a sum if it stays in factors, and if it is formed."""
        record, once = self.records[root], self.records[root].cost_to_form
        rebuilds = max(
            (read.times / max(record.times, 1) for read in record.reads if read.cost_in_factors is None), default=0.0
        )
        in_factors = sum(read.times * read.cost_in_factors for read in record.reads if read.cost_in_factors is not None)
        return in_factors + rebuilds * once, once + sum(read.times * read.cost_as_array for read in record.reads)
