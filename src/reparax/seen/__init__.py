"""What a weight sees: the data that products multiply it with.

``_seeing`` says what a reader of programs does with arrays: it follows them to their products (``_contractions``), and
counts the data there. ``_taps`` collects the gradients at the outputs. ``_order`` says in which order a program reads
weights, and ``_calibrate`` starts one group of them after the other.
"""

from reparax._data.seen import Read as Read
from reparax._data.seen import Seen as Seen
from reparax.seen._calibrate import calibrate as calibrate
from reparax.seen._explained import ExplainedInputs as ExplainedInputs
from reparax.seen._inputs import inputs as inputs
