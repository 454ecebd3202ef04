"""Arrays that share numbers: tied arrays, parts of one block, and cells in the layouts of other libraries.

A layout is data: it lists which rows of which array hold which gate. One reader and one writer handle all layouts.
"""

from reparax.shared._block import Concat as Concat
from reparax.shared._cells import gates as gates
from reparax.shared._convert import convert as convert
from reparax.shared._cudnn import CudnnLSTM as CudnnLSTM
from reparax.shared._pack import Pack as Pack
from reparax.shared._pack import Split as Split
from reparax.shared._tie import Tie as Tie
