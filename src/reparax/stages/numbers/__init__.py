"""Stages for positive and bounded numbers, for other elementwise maps, and for probabilities along an axis."""

from reparax.stages.numbers._numbers import Bounded as Bounded
from reparax.stages.numbers._numbers import Elementwise as Elementwise
from reparax.stages.numbers._numbers import Positive as Positive
from reparax.stages.numbers._numbers import Scale as Scale
from reparax.stages.numbers._numbers import Simplex as Simplex
