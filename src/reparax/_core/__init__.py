"""The algebra: a parametrization is a pure function with a right inverse, and a value; ``>>`` composes them.

``init`` runs the stages of a chain backwards, ``apply`` forwards. Nothing here knows of arrays, markers apart.
"""
