"""Stages for single numbers, such as positive or bounded ones, and for probabilities along an axis."""

from reparax.stages.numbers._elementwise import Bounded as Bounded
from reparax.stages.numbers._elementwise import Elementwise as Elementwise
from reparax.stages.numbers._elementwise import Positive as Positive
from reparax.stages.numbers._elementwise import Scale as Scale
from reparax.stages.numbers._simplex import Simplex as Simplex
