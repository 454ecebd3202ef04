"""Converts state dicts of torch to raw trees, and back.

Both directions make the same plan (:class:`TorchPlan`), which records which torch tensor holds which raw value. The
plan has a group of raw values (:class:`StageValues` of ``_torch_stages.py``) for each stage on each tensor of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.axes import last_to_number
from reparax.core.calls import require_chains, with_any_key
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import describe_as_stored, locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text, types_of_result
from reparax.core.plan import plan_for
from reparax.io._files import read_tensors
from reparax.io._layouts import EXPERTS, HEADS, LAYOUTS, to_layout, torch_shape
from reparax.io._parameters import (
    ORTHOGONAL_MAPS,
    Entry,
    Index,
    Rules,
    choices_by_path,
    list_entries,
    per_layer_names,
    require_layouts,
    require_unique_names,
    stack_parts,
)
from reparax.io._torch_stages import EXCHANGE_PLAIN, NameMap, Naming, StageValues, read_values, write_values
from reparax.stages.matrices import Orthogonal
from reparax.stages.norms import WeightNorm
from reparax.stages.quantized import FakeQuantized


def from_torch(
    p: Parametrization,
    state_dict: Mapping[str, Any],
    like: PyTree,
    *,
    names: Rules = None,
    layouts: Rules = None,
    roles: PyTree = None,
    orthogonal_map: str | Rules = None,
) -> PyTree:
    r"""Converts the state dict of a torch module that is parametrized in the same way as ``p`` to a raw tree of ``p``.

    All raw values are converted, so training can continue: the ``g`` and ``v`` of :class:`WeightNorm`, the vectors of
    :class:`SpectralNorm`, the base of :class:`Orthogonal`, and the masks of pruning. Both torch's parametrizations and
    its hooks are supported. Torch is not needed, because tensors may be arrays, such as those of a safetensors file.

    Two stages have other conventions in torch: the weights are equal, but later training steps differ.

    * :class:`Orthogonal` has other coordinates in torch, and gradient descent takes equal steps only with
      ``map="householder"``. If torch and ``p`` have different maps for a matrix, its weight becomes its new base. The
      same holds for a square matrix with ``map="householder"`` that torch stores transposed.
    * The hook of :class:`SpectralNorm` updates ``v`` before ``u`` in torch.

    A layout describes how the axes of an array in JAX relate to its axes in torch:

    * ``"kernel"``: ``(*spatial, in, out)`` in JAX, ``(out, in, *spatial)`` in torch. The default for matrices named
      ``kernel``.
    * ``"same"``: ``(out, in, *spatial)`` in both.
    * ``"conv_transpose"``: ``(*spatial, in, out)`` in JAX, ``(in, out, *spatial)`` in torch, and flipped along the
      spatial axes. For flax's transposed convolutions without ``transpose_kernel=True``.
    * ``"swapped"``: ``(out, in, *spatial)`` in JAX, ``(in, out, *spatial)`` in torch, and flipped along the spatial
      axes. For equinox's transposed convolutions.
    * ``"conv1d"``: ``(in, out)`` in both. For the weights of ``Conv1D`` in transformers.
    * ``"embedding"``: ``(num, features)`` in both. The default for matrices named ``embedding``.
    * ``"vector"``: ``(out, 1, ..., 1)`` or ``(heads, dim)`` in JAX, one axis in torch. For the biases of equinox's
      convolutions and of attention.
    * ``"to_heads"``: an attention kernel ``(in, heads, dim)`` in JAX, ``(heads * dim, in)`` in torch.
    * ``"from_heads"``: an attention kernel ``(heads, dim, out)`` in JAX, ``(out, heads * dim)`` in torch.
    * ``"experts:kernel"``: ``(experts, in, out)`` in JAX, ``(experts, out, in)`` in torch. For stacks of experts that
      are one tensor in torch too, as in Mixtral and Qwen-MoE of transformers 5.
    * ``"experts:conv1d"``: ``(experts, in, out)`` in both, as in GPT-OSS.
    * ``"experts:same"``: ``(experts, out, in)`` in both.

    No layout is needed for

    * arrays with one axis;
    * linear layers, convolutions and tables of nnx and equinox, whose classes determine the layout if the layer
      computes as its class does;
    * ``w`` and ``embeddings`` with two axes in Haiku's nested modules;
    * ``weight_ih`` and ``weight_hh``;
    * other matrices named ``kernel`` or ``embedding``.

    All other arrays with two or more axes need a layout, or ``{i}`` in their names, because the shape of a square
    matrix does not show whether it is transposed. Arrays of your own nnx and equinox modules need a layout whatever
    their names. A ``kernel`` with more than two axes can be read without a layout if its tensor has the same number of
    axes, because then the array is a convolution. A ``kernel`` with as many inputs as outputs still needs a layout,
    because it may belong to a transposed convolution. For recurrent cells, use :func:`convert`.

    Args:
      p: The chain. For a plain state dict, use ``Chain()`` or a chain of perturbations.
      state_dict: A dict from names to tensors or arrays.
      like: The model's parameters, or their shapes and dtypes.
      names: The torch names of parameters, as a dict from regular expressions to names. A regular expression must match
        a parameter's whole path in JAX, and a name is a tensor's whole name in torch. For example,
        ``{r"layers_(\d+)/kernel": r"\1.weight", r"layers_(\d+)/bias": r"\1.bias"}`` is for a ``Sequential`` of flax and
        of torch. The first match is used, and each ``/`` in the result becomes a ``.``. By default, the name is the
        path, with ``weight`` in place of ``kernel``, ``scale`` and ``embedding``. If layers are stacked along the first
        axis of an array, write ``{i}`` for their index: ``{r"layers/(.*)/kernel": r"model.layers.{i}.\1.weight"}``. For
        a stack along the first two axes, write ``{i}`` and ``{j}``. Stages on the stack need the same axes as
        ``stacked``.
      layouts: The layouts of parameters, as a dict from regular expressions to the layouts above.
      roles: The result of ``rpx.roles(loss, params, batch)``, which records how the network multiplies its arrays. The
        roles determine the layouts of matrices, convolutions, tables and attention kernels for which neither
        ``layouts`` nor a class gives a layout. Roles do not identify ``"conv1d"``, transposed convolutions or experts.
      orthogonal_map: The ``orthogonal_map`` that torch's ``orthogonal`` was called with, because a state dict does not
        record it: ``"matrix_exp"``, ``"cayley"`` or ``"householder"``. Pass ``"default"`` if it was called without one,
        which means ``"matrix_exp"`` for square and complex matrices and ``"householder"`` for all others. Pass one word
        for all matrices, or a dict from regular expressions for paths to words. The argument is not needed if
        :class:`Orthogonal` has torch's default map, or if the matrix still equals its base.

    Returns:
      A raw tree, with None where ``like`` holds no array. For an equinox module, ``eqx.combine(raw, p.init(like))``
      puts its functions back.

    Raises:
      TypeError: If ``p`` is not a parametrization.
      ValueError: If entries of the state dict are missing or unexpected, or have another shape or dtype; the error
        names each of them. Also if a mask holds numbers other than 0 and 1, or if it is not known which map produces an
        orthogonal matrix.

    Example:
      >>> import numpy as np, jax, reparax as rpx
      >>> state_dict = {
      ...     "dense.parametrizations.weight.original0": np.array([[5.0], [1.0]], np.float32),
      ...     "dense.parametrizations.weight.original1": np.array([[3.0, 4.0], [0.0, 1.0]], np.float32),
      ...     "dense.bias": np.zeros(2, np.float32),
      ... }
      >>> like = {"dense": {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}}
      >>> p = rpx.WeightNorm()
      >>> raw = rpx.io.from_torch(p, state_dict, like)
      >>> p.fold(raw)["dense"]["kernel"]
      Array([[3., 0.],
             [4., 1.]], dtype=float32)
    """
    require_chains("io.from_torch(p, state_dict, like)", p)
    arrays = read_tensors("from_torch", state_dict, "state dict", "Call `module.state_dict()`.")
    with locate_errors("from_torch"):
        raw_types = types_of_result(with_any_key(p.init), like)
        plan = _make_plan(p, raw_types, names, layouts, roles, orthogonal_map, arrays)
        found = {entry: [arrays[name] for name in of_entry if name in arrays] for entry, of_entry in plan.names.items()}
        require_layouts(entry.confirm_unambiguous_kernel(tensors) for entry, tensors in found.items() if tensors)
        _require_matching(p, plan, arrays, jax.eval_shape(plan.state_dict, raw_types))
        raw = plan.read({name: jnp.array(x) for name, x in arrays.items()}, raw_types)
        _require_tied(plan, arrays, raw)
    return raw


_STYLES = ("parametrizations", "no_trivialization", "hooks")


def to_torch(
    p: Parametrization,
    raw: PyTree,
    *,
    names: Rules = None,
    layouts: Rules = None,
    roles: PyTree = None,
    orthogonal_map: str | Rules = None,
    style: str | Rules = "parametrizations",
    like: Collection[str] | None = None,
) -> dict[str, np.ndarray]:
    """Converts a raw tree of ``p`` to the state dict of a torch module that is parametrized in the same way.

    The module's ``load_state_dict`` takes ``{name: torch.from_numpy(x) for name, x in state.items()}`` with
    ``strict=True``, and safetensors takes the arrays directly. Each array has the dtype of its weight. Torch cannot
    read bfloat16 from numpy: use a file, or convert to float32, which ``load_state_dict`` casts back.

    If torch has no equivalent of ``p``, or if you want plain weights there, use ``to_torch(Chain(), p.fold(raw))``.

    Args:
      p: The chain.
      raw: A raw tree of ``p``.
      names: As for :func:`from_torch`.
      layouts: As for :func:`from_torch`, except that no tensor shows the number of axes, so all convolutions of linen
        need a layout, or ``roles``.
      roles: As for :func:`from_torch`.
      orthogonal_map: As for :func:`from_torch`. If torch uses another map than ``p`` for an orthogonal matrix, the
        matrix is written with its weight as the base.
      style: How torch names the raw values: ``"parametrizations"`` for ``torch.nn.utils.parametrizations``;
        ``"no_trivialization"`` for the same without bases, as in ``orthogonal(..., use_trivialization=False)``; or
        ``"hooks"`` for ``torch.nn.utils.weight_norm`` and ``torch.nn.utils.spectral_norm``. Pruning has only one style.
        Pass one word for all parameters, or a dict from regular expressions for paths to words. The first match is
        used, and a parameter without a match has the default style.
      like: A state dict of the module, or the names in it, which show the style of each tensor. Pass it instead of
        ``style``.

    Raises:
      TypeError: If ``p`` is not a parametrization.
      ValueError: If torch has no equivalent of a stage of ``p``, or if ``p`` did not create the raw tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm()
      >>> raw = p.init({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}})
      >>> {name: x.shape for name, x in rpx.io.to_torch(p, raw, style="hooks").items()}
      {'dense.bias': (2,), 'dense.weight_g': (2, 1), 'dense.weight_v': (2, 3)}
    """
    require_chains("io.to_torch(p, raw)", p)
    with locate_errors("to_torch"):
        if rounded := [stage for stage in Chain((p,)).stages if isinstance(stage, FakeQuantized)]:
            raise ValueError(f"torch has no equivalent of {rounded[0]!r}. {EXCHANGE_PLAIN}")
        plan = _make_plan(p, raw, names, layouts, roles, orthogonal_map, like, style)
        require_layouts(plan.names)

        def has_base(group: StageValues) -> bool:
            return group.entry.style != "no_trivialization" if like is None else group.names.get("base") in like

        state = plan.state_dict(raw, has_base)
        return {name: np.array(x) for name, x in sorted(state.items())}


@dataclass(frozen=True)
class TorchPlan:
    """The torch tensors that hold the raw values of a chain.

    Attributes:
      weights: The chain without perturbations. Its effective weights are the weights in torch.
      groups: The raw values, grouped by stage and tensor.
      tied: The tensors of tied parameters, which have no raw values of their own.
    """

    weights: Parametrization
    groups: Sequence[StageValues]
    tied: Sequence[Entry]

    @property
    def names(self) -> dict[Entry, list[str]]:
        """Maps each entry, a torch weight, to the names of the torch tensors that hold its raw values."""
        names = {entry: [entry.tensor] for entry in self.tied}
        for group in self.groups:
            names.setdefault(group.entry, []).extend(group.names.values())
        return names

    def state_dict(self, raw: PyTree, has_base: Callable[[StageValues], bool] = lambda group: True) -> dict[str, Array]:
        """Converts a raw tree, concrete or traced, to a state dict.

        ``has_base`` returns whether torch stores the base of an :class:`Orthogonal`, given its group of values.
        """
        arrays = dict(items(raw))
        state = dict[str, Array]()
        for group in self.groups:
            with locate_errors(repr(group.entry.path)):
                values = {value: group.entry.slice_of(arrays[keys]) for value, keys in group.keys.items()}
                tensors = write_values(group.stage, values, group.entry, with_base=has_base(group))
            state |= {group.names[value]: x for value, x in tensors.items()}
        return state | self.tied_tensors(raw)

    def tied_tensors(self, raw: PyTree) -> dict[str, Array]:
        """Computes the weights of tied parameters, which torch stores under the names of both parameters of a tie."""
        effective = {path_text(names): x for names, x in items(self.weights.fold(raw))} if self.tied else {}
        return {entry.tensor: to_layout(entry.slice_of(effective[entry.path]), entry.layout) for entry in self.tied}

    def read(self, state: Mapping[str, Array], like: PyTree) -> PyTree:
        """Converts a state dict to a raw tree with the structure of ``like``."""
        paths, leaves, treedef = flatten_with_names(like)
        type_at = dict(zip(paths, leaves, strict=True))
        parts = dict[Names, dict[Index, Array]]()
        for group in self.groups:
            values = {value: state[name] for value, name in group.names.items() if name in state}
            types = {value: group.entry.slice_of(type_at[keys]) for value, keys in group.keys.items()}
            with locate_errors(repr(group.entry.path)):
                values = read_values(group.stage, values, group.entry, types)
            for value, x in values.items():
                parts.setdefault(group.keys[value], {})[group.entry.index] = x
        return treedef.unflatten([stack_parts(parts[path]) for path in paths])


def _make_plan(
    p: Parametrization,
    raw: PyTree,
    names: Rules,
    layouts: Rules,
    roles: PyTree,
    orthogonal_map: str | Rules,
    names_in_torch: Collection[str] | None,
    style: str | Rules = None,
) -> TorchPlan:
    """Plans which torch tensor holds which raw value of ``p``. ``raw`` may hold arrays, or only shapes and dtypes.

    ``names_in_torch`` holds the names in a state dict, which show where torch uses hooks. If ``names_in_torch`` is
    None, ``style`` determines where torch uses hooks. The other arguments are the same as for :func:`from_torch`.
    """

    def is_hooked(entry: Entry, tensor: str, name_map: NameMap) -> bool:
        if names_in_torch is None:
            return entry.style == "hooks"
        return any(tensor + suffix in names_in_torch for suffix in name_map.hooked.values())

    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation)))
    plan = plan_for(weights, raw, mean=True)
    naming = Naming(plan.producers, is_hooked)
    groups = list[StageValues]()
    tied_entries = list[Entry]()
    entries = list_entries(plan.effective, names, layouts, roles)
    paths = [entry.path for entry in entries]
    maps = choices_by_path(paths, orthogonal_map, "orthogonal_map", "map of torch", ("default", *ORTHOGONAL_MAPS))
    styles = choices_by_path(paths, style, "style", "style", _STYLES)
    for entry in entries:
        place = plan.places[entry.path]
        entry = replace(entry, orthogonal_map=maps.get(entry.path), style=styles.get(entry.path, entry.style))
        if plan.has_values(place):
            groups += naming.groups_of(place, entry)
        else:
            tied_entries.append(entry)
    torch_plan = TorchPlan(weights, groups, tied_entries)
    require_unique_names((name, entry.path) for entry, of_entry in torch_plan.names.items() for name in of_entry)
    return torch_plan


def _require_matching(p: Parametrization, plan: TorchPlan, state: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raises an error with a line for each tensor of a state dict whose name, shape or dtype is not as expected."""
    owners = {name: entry for entry, names in plan.names.items() for name in names}
    optional = {entry.tensor for entry in plan.tied}
    optional |= {group.names["base"] for group in plan.groups if isinstance(group.stage, Orthogonal)}
    missing = types.keys() - state.keys() - optional
    lines = {name: f"missing, expected {describe_as_stored(types[name])} for {owners[name].path}" for name in missing}
    for name, x in state.items():
        found = describe_as_stored(x)
        expected = describe_as_stored(types[name]) if name in types else None
        if expected is None:
            lines[name] = f"unexpected, holds {found}"
        elif found != expected:
            fit = _suggest_fit(plan, name, x.shape) if x.shape != types[name].shape else ""
            lines[name] = f"expected {expected} for {owners[name].path}, got {found}{fit}"
    if not lines:
        return
    entries_missing = [owners[name] for name in sorted(missing)]
    doubtful = [x.path for x in entries_missing if not x.is_known and not any(name in state for name in plan.names[x])]
    stack = f"If {doubtful[0]!r} is a stack, name each layer: {per_layer_names(doubtful[0])}. " if doubtful else ""
    text = "\n  ".join(f"{name}: {lines[name]}" for name in sorted(lines))
    raise ValueError(
        f"the state dict does not fit {p!r}:\n  {text}\n{stack}Pass the chain, `names` and `layouts` that belong to "
        f"the torch module, and remove entries that are not parameters from the state dict and from `like`."
    )


def _suggest_fit(plan: TorchPlan, name: str, shape: tuple[int, ...]) -> str:
    """Returns the end of an error text that suggests an axis or layouts for which a tensor's shape would fit.

    The text is empty if nothing fits, and for arrays with at most two axes.
    """
    group = next((group for group in plan.groups if name in group.names.values()), None)
    if group is None or len(group.entry.shape) <= 2:
        return ""
    entry = group.entry
    if isinstance(group.stage, WeightNorm) and name == group.names["g"]:
        axes = [
            axis for axis in range(-len(entry.shape), 0) if torch_shape(_norm_shape(entry, axis), entry.layout) == shape
        ]
        axis = last_to_number(group.stage.axis)
        fits = [f"WeightNorm(axis={axes[0]})"] if len(axes) == 1 else []
        expected = _norm_shape(entry, axis) if isinstance(axis, int) else None
    else:
        fits, expected = list[str](), entry.shape
    if expected is not None and not entry.by_class:
        others = [layout for layout in LAYOUTS if layout not in ("conv1d", "embedding", "vector", entry.layout)]
        if len(entry.shape) != 3:
            others = [layout for layout in others if layout not in HEADS and not layout.startswith(EXPERTS)]
        layouts = [layout for layout in others if torch_shape(expected, layout) == shape]
        fits += [f"layouts={{{entry.path!r}: {layout!r}}}" for layout in layouts]
    return f", which fits {' or '.join(fits)}" if fits else ""


def _norm_shape(entry: Entry, axis: int) -> tuple[int, ...]:
    """Returns the shape of WeightNorm's ``g``, which has one norm for each index along ``axis``."""
    return tuple(size if i == axis % len(entry.shape) else 1 for i, size in enumerate(entry.shape))


def _require_tied(plan: TorchPlan, state: Mapping[str, np.ndarray], raw: PyTree) -> None:
    """Raises an error if the torch tensor of a tied parameter differs from the parameter that it is tied to."""
    tied_tensors = plan.tied_tensors(raw)
    for entry in plan.tied:
        name = entry.tensor
        if name in state and not np.array_equal(tied_tensors[name], state[name]):
            raise ValueError(
                f"the tensor {name!r} must equal the parameter that {entry.path!r} is tied to, but differs from it. "
                f"Remove the tie from the chain, or the tensor from the state dict."
            )
