"""Weights that stay in factors wherever they can, also where that costs more."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from reparax.transforms._factored import SumPlan


@contextmanager
def in_factors() -> Iterator[None]:
    """A context in which plans keep all weights of products in factors, and the weights of which these are made."""
    decide = SumPlan.decide

    def keep(plan: SumPlan) -> None:
        decide(plan)
        needed = set()
        for root, record in reversed(plan.records.items()):
            if root in needed or any(read.cost_in_factors is not None for read in record.reads):
                record.is_formed = False
                needed.update(record.parents)

    with mock.patch.object(SumPlan, "decide", keep):
        yield
