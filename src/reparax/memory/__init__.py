"""What a gradient keeps between its two passes: to keep less, and to see what is kept."""

from reparax.memory._remat import remat as remat
from reparax.memory._saved import Saved as Saved
from reparax.memory._saved import saved as saved
