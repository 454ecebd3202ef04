"""Maps of each number by itself, such as to positive ones, and of numbers that add up to one."""

from reparax.numbers._elementwise import Bounded as Bounded
from reparax.numbers._elementwise import Elementwise as Elementwise
from reparax.numbers._elementwise import Positive as Positive
from reparax.numbers._elementwise import Scale as Scale
from reparax.numbers._simplex import Simplex as Simplex
