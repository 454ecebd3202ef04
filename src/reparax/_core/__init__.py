"""The algebra: a parametrization is a pure function with a right inverse, and a value; ``>>`` composes them.

``init`` runs the stages of a chain backwards, ``apply`` forwards. A stage is told by its fields alone: they are its
repr, its JSON, its equality and its hash. Nothing here knows of arrays, markers apart.
"""
