"""Stages for arrays that share entries: tied arrays, parts of one block, and cells in layouts of other libraries.

A layout is a dict that says which rows of which array hold which gate of a cell, so the same functions read and write
all layouts.
"""

from reparax.stages.shared._cells import Concat as Concat
from reparax.stages.shared._cells import convert as convert
from reparax.stages.shared._cells import gates as gates
from reparax.stages.shared._pack import CudnnLSTM as CudnnLSTM
from reparax.stages.shared._pack import Pack as Pack
from reparax.stages.shared._pack import Split as Split
from reparax.stages.shared._tie import Tie as Tie
