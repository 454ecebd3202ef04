"""Statistics of the data that products multiply weights by, and starts from them.

``_seeing`` follows arrays through a program to their products (``_contractions``), and collects the data there.
``_taps`` collects the gradients at the outputs. ``_order`` finds the order in which a program reads weights, and
``_calibrate`` starts one group of them after the other.
"""

from reparax._data.seen import Read as Read
from reparax._data.seen import Seen as Seen
from reparax.seen._calibrate import calibrate as calibrate
from reparax.seen._explained import ExplainedInputs as ExplainedInputs
from reparax.seen._inputs import inputs as inputs
