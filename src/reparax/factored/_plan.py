"""Which weights stay sums of products, and which are formed: decided by what each costs the whole program."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn

from reparax.factored._sums import Sum


@dataclass(frozen=True)
class Read:
    """What reads a sum.

    Attributes:
      eqn: The equation; None for the result of a program or of a body.
      times: How often it runs.
      in_formula: Whether it is a part of a parametrization, and no product of the network.
      factored: Of a product, what it costs factor by factor; None where the array is needed.
      formed: Of a product, what it costs with the array.
    """

    eqn: JaxprEqn | None
    times: int
    in_formula: bool
    factored: float | None = None
    formed: float = 0.0


@dataclass
class Record:
    """What is known of a sum.

    Attributes:
      eqn: The equation that made it.
      shape: Its shape.
      dtype: Its dtype.
      origins: The arguments that it comes from.
      parents: The sums that it is made of.
      forming: What it costs to form it, with these.
      times: How often it is made.
      reads: What reads it, without other sums that are made of it.
      is_formed: Whether it is formed where it is made.
    """

    eqn: JaxprEqn
    shape: tuple[int, ...]
    dtype: Any
    origins: frozenset[int]
    parents: Sequence[Hashable]
    forming: float
    times: int
    reads: list[Read] = field(default_factory=list)
    is_formed: bool = False


class Plan:
    """What reads each sum, noted in one evaluation of a program; and then which sums are formed, for another.

    Attributes:
      records: Of each sum, by its root.
      is_decided: Whether it is known which sums are formed. Nothing is noted from then on.
    """

    def __init__(self) -> None:
        self.records: dict[Hashable, Record] = {}
        self.is_decided = False

    def note(self, root: Hashable, record: Record) -> None:
        """Notes a new sum."""
        self.records[root] = record

    def reads(self, x: Sum, read: Read) -> None:
        """Notes what reads a sum."""
        if not self.is_decided:
            self.records[x.root].reads.append(read)

    def forms(self, root: Hashable) -> bool:
        """Whether a sum is formed where it is made; so is one that only another that is formed makes."""
        return root not in self.records or self.records[root].is_formed

    def decide(self) -> None:
        """Chooses for each sum, the last first: of what another is made of that stays apart, the factors are needed."""
        needed = set[Hashable]()
        for root, record in reversed(self.records.items()):
            factored, formed = self.costs(root)
            arrays = [read for read in record.reads if read.factored is None]
            if root not in needed and (formed < factored or (arrays and formed == factored)):
                record.is_formed = True
                for parent in record.parents:
                    self.records[parent].reads.append(Read(record.eqn, record.times, in_formula=True))
            elif root in needed or record.reads:
                needed.update(record.parents)
        self.is_decided = True

    def costs(self, root: Hashable) -> tuple[float, float]:
        """What all that reads a sum costs where it stays apart, and where it is formed."""
        record, once = self.records[root], self.records[root].forming
        again = max((read.times / max(record.times, 1) for read in record.reads if read.factored is None), default=0.0)
        factored = sum(read.times * read.factored for read in record.reads if read.factored is not None)
        return factored + again * once, once + sum(read.times * read.formed for read in record.reads)
