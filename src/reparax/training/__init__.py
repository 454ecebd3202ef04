"""Functions for training raw trees: which values train, optimizers, conversion to other chains, and summary tables."""

from reparax.training._optimizer import optimizer as optimizer
from reparax.training._optimizer import projected as projected
from reparax.training._optimizer import reset_moments as reset_moments
from reparax.training._optimizer import state_shardings as state_shardings
from reparax.training._partition import combine as combine
from reparax.training._partition import decay_mask as decay_mask
from reparax.training._partition import is_parametrized as is_parametrized
from reparax.training._partition import param_labels as param_labels
from reparax.training._partition import partition as partition
from reparax.training._summary import summary as summary
from reparax.training._transfer import transfer as transfer
