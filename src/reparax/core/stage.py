"""Collects the classes and functions that you need to write a stage of your own.

A stage derives from ``Reparametrization`` or ``Perturbation``, which act on one array; from ``Constraint``, whose
effective arrays lie in a given set; or from ``Joint``, which acts on several arrays at once. A random stage is a
``Perturbation`` if it has no raw values, and otherwise a ``Reparametrization`` with ``stochastic = True``. A ``Joint``
cannot be random. A stage declares its raw values with ``main``, ``aux`` and ``fixed``, and its arguments with
``field``, ``number_field`` and ``axes_field``.

Use the types ``Where``, ``Axes`` and ``Number`` to annotate the arguments of a stage.
"""

from reparax.core.axes import Axes as Axes
from reparax.core.axes import other_axes as other_axes
from reparax.core.chain import Chain as Chain
from reparax.core.chain import Parametrization as Parametrization
from reparax.core.chain import from_json as from_json
from reparax.core.constraint import Constraint as Constraint
from reparax.core.fields import Number as Number
from reparax.core.fields import axes_field as axes_field
from reparax.core.fields import field as field
from reparax.core.fields import number_field as number_field
from reparax.core.joint import Joint as Joint
from reparax.core.leaf import Perturbation as Perturbation
from reparax.core.leaf import Reparametrization as Reparametrization
from reparax.core.values import aux as aux
from reparax.core.values import fixed as fixed
from reparax.core.values import main as main
from reparax.core.where import Where as Where
from reparax.core.where import all_but as all_but
from reparax.core.where import selected as selected
from reparax.numerics.terms import Term as Term
