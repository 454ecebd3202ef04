"""What chains are made of, and what authors of stages write.

A stage derives from ``Reparametrization`` or ``Perturbation``, which act on one array, from ``Constraint``, whose image
is a set, or from ``Joint`` or ``Together``, which act on several arrays. It declares its raw values with ``main``,
``aux`` and ``fixed``, and its arguments with ``argument`` and ``axes``.

``Where``, ``Axes``, ``Number`` and ``PyTree`` are the types of arguments.
"""

from reparax.core.axes.numbers import Axes as Axes
from reparax.core.axes.numbers import other_axes as other_axes
from reparax.core.chains.algebra import Chain as Chain
from reparax.core.chains.algebra import Parametrization as Parametrization
from reparax.core.chains.json import from_json as from_json
from reparax.core.chains.value import argument as argument
from reparax.core.chains.value import axes_field as axes_field
from reparax.core.stages.constraint import Constraint as Constraint
from reparax.core.stages.joint import Joint as Joint
from reparax.core.stages.leaf import Perturbation as Perturbation
from reparax.core.stages.leaf import Reparametrization as Reparametrization
from reparax.core.stages.mean import Mean as Mean
from reparax.core.stages.together import Together as Together
from reparax.core.stages.varied import Number as Number
from reparax.core.stages.varied import per_array as per_array
from reparax.core.stages.where import Where as Where
from reparax.core.stages.where import all_but as all_but
from reparax.core.stages.where import selected as selected
from reparax.core.tree.paths import PyTree as PyTree
from reparax.core.tree.values import aux as aux
from reparax.core.tree.values import fixed as fixed
from reparax.core.tree.values import main as main
from reparax.numerics.arguments import check_number as check_number
from reparax.numerics.arguments import check_positive_number as check_positive_number
from reparax.numerics.terms import Term as Term
