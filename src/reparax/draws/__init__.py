"""Draws inside of products: noise for each example, drawn for the result and not for the weight.

``_drawing`` says what a reader of programs does with noisy weights: it follows them to their products, of which
``_noisy`` knows the mean and the variance.
"""

from reparax.draws._explained import ExplainedDraws as ExplainedDraws
from reparax.draws._local import local as local
