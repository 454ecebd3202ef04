"""The algebra of parametrizations: pure functions with a right inverse, which ``>>`` composes.

``init`` runs the stages of a chain from last to first, ``apply`` from first to last. A stage is fully described by its
fields: its repr, JSON, equality and hash come from them. This package knows markers, but no formulas on arrays.
"""
