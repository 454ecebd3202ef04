"""What chains are made of, and what authors of stages write.

A stage derives from ``Reparametrization`` or ``Perturbation``, which act on one array, from ``Constraint``, whose image
is a set, or from ``Joint`` or ``Together``, which act on several arrays. It declares its raw values with ``main``,
``aux`` and ``fixed``, and its arguments with ``argument`` and ``axes``.

``Where``, ``Axes``, ``Number`` and ``PyTree`` are the types of arguments.
"""

from reparax._axes.numbers import Axes as Axes
from reparax._axes.numbers import other_axes as other_axes
from reparax._core.algebra import Chain as Chain
from reparax._core.algebra import Parametrization as Parametrization
from reparax._core.json import from_json as from_json
from reparax._core.value import argument as argument
from reparax._core.value import axes as axes
from reparax._numerics.arguments import check_number as check_number
from reparax._numerics.arguments import check_positive_number as check_positive_number
from reparax._numerics.terms import Term as Term
from reparax._stage.constraint import Constraint as Constraint
from reparax._stage.joint import Joint as Joint
from reparax._stage.leaf import Perturbation as Perturbation
from reparax._stage.leaf import Reparametrization as Reparametrization
from reparax._stage.mean import Mean as Mean
from reparax._stage.together import Together as Together
from reparax._stage.varied import Number as Number
from reparax._stage.varied import per_array as per_array
from reparax._stage.where import Where as Where
from reparax._stage.where import all_but as all_but
from reparax._stage.where import selected as selected
from reparax._tree.paths import PyTree as PyTree
from reparax._tree.values import aux as aux
from reparax._tree.values import fixed as fixed
from reparax._tree.values import main as main
