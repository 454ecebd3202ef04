"""Converts the raw values of stages that have an equivalent in torch, and finds torch's names for these values.

To add a stage, add an entry to ``NAME_MAPS``, and a case to the functions that write and read one value. Torch has
stages in two forms. A parametrization keeps its values in a list, ``parametrizations.weight``, and calls the weight
that it replaces its original. A hook keeps its values beside the weight, with suffixes: ``weight_g``.

Torch stores a tall orthogonal matrix as :math:`B f(L)` with a square base B and a lower triangular L, and uses only the
first columns. reparax applies the same f to :math:`X = B L`, with the first columns of B as the base. For reflections,
torch stores signs in the diagonal of L, which are initially -1; in reparax they are always -1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import EACH, list_axes
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.paths import Names
from reparax.core.raw import parameter_path
from reparax.io._layouts import HEADS, from_layout, to_layout, torch_shape
from reparax.io._parameters import ORTHOGONAL_MAPS, Entry, unstack_stage
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import adjoint, identity, product
from reparax.stages.matrices import Orthogonal
from reparax.stages.norms import SpectralNorm, WeightNorm
from reparax.stages.sparse import Freeze, GlobalMagnitudePruning, MagnitudePruning, Mask, NByM, RandomPruning

EXCHANGE_PLAIN = (
    "Exchange plain weights: `p.init(from_torch(Chain(), state_dict, like))`, `to_torch(Chain(), p.fold(raw))`."
)
Values = dict[str, Array]


@dataclass(frozen=True)
class NameMap:
    """Torch's names for the raw values of a stage.

    Attributes:
      listed: The names for a parametrization, below ``parametrizations.weight``. The index of the parametrization
        precedes each name, except for originals.
      hooked: The suffixes for a hook, after ``weight``.
      fields: The fields of the stage that torch also has, or that do not affect what the module computes. All other
        fields must have their defaults. None allows all fields, because the values alone determine what the stage does.
    """

    listed: Mapping[str, str]
    hooked: Mapping[str, str]
    fields: tuple[str, ...] | None = None


_PRUNED = (Mask, NByM, MagnitudePruning, RandomPruning, GlobalMagnitudePruning)
NAME_MAPS: dict[type[Parametrization], NameMap] = {
    WeightNorm: NameMap({"g": "original0", "v": "original1"}, {"g": "_g", "v": "_v"}, ("where", "outside", "axis")),
    SpectralNorm: NameMap(
        {"w": "original", "u": "_u", "v": "_v"},
        {"w": "_orig", "u": "_u", "v": "_v"},
        ("where", "outside", "rows", "columns", "n_steps"),
    ),
    Orthogonal: NameMap({"x": "original", "base": "base"}, {}),
    Freeze: NameMap({}, {"w": ""}),
    **dict.fromkeys(_PRUNED, NameMap({}, {"w": "_orig", "mask": "_mask"})),
}


@dataclass(frozen=True)
class StageValues:
    """The raw values of one stage on one tensor of the model.

    Attributes:
      stage: The stage as it acts on one layer of a stack; None for an array of the raw tree that no stage computes.
      entry: The tensor of the model.
      keys: The path of each value in the raw tree.
      names: The torch name of each value.
    """

    stage: Parametrization | None
    entry: Entry
    keys: Mapping[str, Names]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Naming:
    """Finds torch's names for the raw values of a chain.

    Attributes:
      producers: Maps the key path of an array to the stage that computes it and to the key paths of the stage's values.
      is_hooked: Returns whether torch uses a hook for a tensor whose stage exists as a hook.
    """

    producers: Mapping[Names, tuple[Any, Mapping[str, Names]]]
    is_hooked: Callable[[Entry, str, NameMap], bool]

    def groups_of(self, place: Names, entry: Entry) -> list[StageValues]:
        """Returns the raw values for a tensor of the model, grouped by stage."""
        return self._visit(place, entry, entry.tensor)[1]

    def _visit(self, place: Names, entry: Entry, tensor: str, outer: str = "") -> tuple[int, list[StageValues]]:
        """Counts the torch parametrizations that compute the array at a key path, and lists their raw values by stage.

        ``tensor`` is the array's name in torch. If the array is the original of a parametrization, ``outer`` is the
        name of the list that holds this parametrization. Otherwise, ``outer`` is empty.
        """
        if place not in self.producers:
            return 0, [StageValues(None, entry, {"": place}, {"": tensor})]
        stage, places = self.producers[place]
        if type(stage) not in NAME_MAPS:
            raise ValueError(f"{parameter_path(place)!r}: torch has no equivalent of {stage!r}. {EXCHANGE_PLAIN}")
        name_map = NAME_MAPS[type(stage)]
        computed = [value for value, place in places.items() if place in self.producers]
        is_hook = not outer and bool(name_map.hooked) and self.is_hooked(entry, tensor, name_map)
        is_listed = bool(name_map.listed) and not is_hook
        number, inner = 0, list[StageValues]()
        names = {value: tensor + suffix for value, suffix in name_map.hooked.items()}
        if is_listed:
            parametrizations = outer or _parametrizations_of(tensor)
            # If another stage computes the original, torch keeps both stages in one list, with the other stage first.
            original = next((value for value in computed if name_map.listed.get(value) == "original"), None)
            if original is not None:
                number, inner = self._visit(places[original], entry, f"{parametrizations}.original", parametrizations)
                computed.remove(original)
                places = {value: place for value, place in places.items() if value != original}
            names = {
                value: f"{parametrizations}.{name if name.startswith('original') else f'{number}.{name}'}"
                for value, name in name_map.listed.items()
            }
        for value in computed:
            inner += self._visit(places[value], entry, names[value])[1]
        if name_map.listed:
            with locate_errors(repr(entry.path)):
                stage = unstack_stage(stage, len(entry.index))
                _require_supported_fields(stage, name_map)
        stored = {value: place for value, place in places.items() if value not in computed}
        group = StageValues(stage, entry, stored, {value: names[value] for value in stored})
        return number + is_listed, [*inner, group]


def _parametrizations_of(tensor: str) -> str:
    """Returns the name of the list of a tensor's parametrizations: ``a.weight -> a.parametrizations.weight``."""
    module, dot, name = tensor.rpartition(".")
    return f"{module}{dot}parametrizations.{name}"


def _require_supported_fields(stage: Any, name_map: NameMap) -> None:
    """Raises an error if a field of the stage has a value for which torch has no equivalent."""
    for field in fields(stage):
        is_foreign = name_map.fields is not None and field.name not in name_map.fields
        if is_foreign and getattr(stage, field.name) != field.default:
            how = "Name each layer of a stack with {i} in `names`. " if field.name == "stacked" else ""
            raise ValueError(f"torch has no equivalent of the field {field.name} in {stage!r}. {how}{EXCHANGE_PLAIN}")


def write_values(stage: Parametrization | None, values: Values, entry: Entry, *, with_base: bool) -> Values:
    """Converts the raw values of a stage to the values that torch stores, which have the dtype of the weight."""
    _require_plain_heads(stage, entry)
    if stage is None:
        return {name: to_layout(x, entry.layout) for name, x in values.items()}
    if isinstance(stage, Orthogonal):
        tensors = _orthogonal_to_torch(*_with_rows_first(stage, entry), values, with_base=with_base)
    else:
        tensors = {name: _write_value(stage, name, x, entry) for name, x in values.items()}
    real = jnp.finfo(entry.dtype).dtype
    return {name: x.astype(entry.dtype if jnp.iscomplexobj(x) else real) for name, x in tensors.items()}


def read_values(stage: Parametrization | None, values: Values, entry: Entry, like: Mapping[str, Any]) -> Values:
    """Converts torch's values to the raw values of a stage, in the shapes and dtypes of ``like``."""
    _require_plain_heads(stage, entry)
    if entry.layout == "vector":
        values = {name: x.reshape(entry.shape) for name, x in values.items()}
    if isinstance(stage, Orthogonal):
        raw_values = _orthogonal_from_torch(*_with_rows_first(stage, entry), values)
    else:
        raw_values = {name: _read_value(stage, name, x, entry, like[name].shape) for name, x in values.items()}
    return {name: x.astype(like[name].dtype) for name, x in raw_values.items()}


def _write_value(stage: Parametrization, name: str, x: Array, entry: Entry) -> Array:
    """Converts one raw value to the value that torch stores."""
    match stage, name:
        case WeightNorm(axis=axis), "g":
            if isinstance(axis, tuple) or axis == EACH:
                raise ValueError(
                    f"torch's weight norm has a norm for each index of a single axis, unlike {stage!r}. "
                    f"{EXCHANGE_PLAIN}"
                )
            return x.reshape(()) if axis is None else to_layout(x, entry.layout)
        case SpectralNorm(), "u":
            return x
        case SpectralNorm(), "v":
            return to_layout(x.reshape(_shape_of_column(stage, entry.shape)), entry.layout).reshape(-1)
        case _, "mask":
            return to_layout(jnp.broadcast_to(x, entry.shape), entry.layout)
        case _:
            return to_layout(x, entry.layout)


def _read_value(stage: Parametrization | None, name: str, x: Array, entry: Entry, shape: tuple[int, ...]) -> Array:
    """Converts one of the values that torch stores for a stage to a raw value of the given shape."""
    match stage, name:
        case WeightNorm(axis=None), "g":
            return x.reshape(shape)
        case SpectralNorm(), "u":
            return x
        case SpectralNorm(), "v":
            shape_in_torch = torch_shape(_shape_of_column(stage, entry.shape), entry.layout)
            return from_layout(x.reshape(shape_in_torch), entry.layout).reshape(-1)
        case _, "mask":
            return _mask_of_slices(_require_binary(from_layout(x, entry.layout)), shape)
        case _:
            return from_layout(x, entry.layout).reshape(shape)


def _require_plain_heads(stage: Parametrization | None, entry: Entry) -> None:
    """Raises an error if a stage other than ``Freeze`` acts on an attention kernel, whose heads torch merges."""
    if entry.layout in HEADS and not isinstance(stage, Freeze | None):
        raise ValueError(f"torch merges attention heads, so it has no equivalent of {stage!r}. {EXCHANGE_PLAIN}")


def _shape_of_column(stage: SpectralNorm, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of one column of an array, with size 1 along the column axis.

    Raises an error if the stage has several column axes, because torch has only one.
    """
    _, columns = stage.axes_of(len(shape))
    if len(columns) > 1:
        raise ValueError(f"torch's spectral norm has a single column axis, unlike {stage!r}. {EXCHANGE_PLAIN}")
    return tuple(1 if i in columns else size for i, size in enumerate(shape))


def _require_binary(mask: Array) -> Array:
    """Returns the mask. Raises an error if the mask is not binary, because gradients would then differ from torch's."""
    others = mask[(mask != 0) & (mask != 1)]
    if others.size:
        raise ValueError(
            f"a pruning mask must consist of zeros and ones, but got {float(others[0]):.3g}. Apply the mask in torch "
            f"with `prune.remove`, and call `init` with the result."
        )
    return mask


def _mask_of_slices(mask: Array, shape: tuple[int, ...]) -> Array:
    """Reduces a mask of single weights to the raw value's shape, which may have only one entry for each slice."""
    axes = tuple(i for i, (size, full_size) in enumerate(zip(shape, mask.shape, strict=True)) if size < full_size)
    slice_mask = jnp.max(mask, axis=axes, keepdims=True)
    if not jnp.all(slice_mask == mask):
        raise ValueError(
            f"the stage prunes whole slices (mask shape {shape}), but torch's mask differs within a slice. Pass "
            f"`axis='each'` to the stage."
        )
    return slice_mask


def _with_rows_first(stage: Orthogonal, entry: Entry) -> tuple[Orthogonal, Entry]:
    """Returns the stage without axis fields, and the entry for the matrix ``(rows, columns)`` that it parametrizes.

    If the array does not have exactly one row axis and one column axis, returns both arguments unchanged.
    """
    axes = stage.axes_of(2) if len(entry.shape) == 2 else None
    if axes not in (((0,), (1,)), ((1,), (0,))):
        return stage, entry
    return replace(stage, rows=None, columns=None), entry if axes == ((0,), (1,)) else entry.transposed()


def _orthogonal_to_torch(stage: Orthogonal, entry: Entry, values: Values, *, with_base: bool) -> Values:
    """Converts raw values of ``Orthogonal`` to torch's values, which include a base only if ``with_base`` is True."""
    _require_same_matrices(stage, values, entry)
    shares_coordinates = _shares_coordinates(stage, entry)
    in_layout = {name: to_layout(x, entry.layout) for name, x in values.items()}
    if shares_coordinates and (with_base or (stage.map != "householder" and _has_identity_base(in_layout))):
        written = _write_orthogonal(stage, in_layout)
        return written if with_base else {"x": written["x"]}
    w = to_layout(widened(stage.apply_leaf(values)), entry.layout)
    if with_base:
        return _write_orthogonal(stage, _with_base_at_weight(w))
    if _torch_map(entry) == "householder":
        return {"x": _write_reflections(w)}
    raise ValueError(
        f"without trivialization, torch's base is the identity, but {stage!r} has another base or another map than "
        f"torch. Pass style='parametrizations', or orthogonal_map='householder', which torch can invert."
    )


def _orthogonal_from_torch(stage: Orthogonal, entry: Entry, values: Values) -> Values:
    """Converts the values that torch stores for an orthogonal matrix to raw values of ``Orthogonal``."""
    _require_same_matrices(stage, values, entry)
    _require_known_map(stage, values["x"], entry)
    torch_stage = replace(stage, map=_torch_map(entry))
    raw_values = _read_orthogonal(torch_stage, values)
    if not _shares_coordinates(stage, entry):
        raw_values = _with_base_at_weight(torch_stage.apply_leaf(raw_values))
    return {name: from_layout(x, entry.layout) for name, x in raw_values.items()}


def _shares_coordinates(stage: Orthogonal, entry: Entry) -> bool:
    """Returns whether torch and the stage use the same coordinates for an orthogonal matrix.

    The coordinates are the same if the map is the same, except for reflections of a square matrix that torch stores
    transposed.
    """
    is_transposed_square = entry.has_other_order and entry.shape[-2] == entry.shape[-1]
    return _torch_map(entry) == stage.map and not (stage.map == "householder" and is_transposed_square)


def _require_same_matrices(stage: Orthogonal, values: Values, entry: Entry) -> None:
    """Raises an error if the stage and torch do not orthogonalize the same matrices."""
    if "x" not in values:
        raise ValueError(f"torch has no equivalent of {stage!r} on a value of another stage. {EXCHANGE_PLAIN}")
    leading = tuple(range(len(entry.shape) - 2))
    has_named_axes = stage.rows is not None or stage.columns is not None
    if has_named_axes or tuple(sorted(list_axes(stage.stacked))) != leading or (entry.has_other_order and leading):
        raise ValueError(
            f"torch's `orthogonal` acts on the matrices in the last two axes of a tensor, but {stage!r} acts on other "
            f"matrices. {EXCHANGE_PLAIN}"
        )


def _torch_map(entry: Entry) -> str:
    """Returns the ``map`` of ``Orthogonal`` that torch uses for a weight: ``orthogonal_map``, or else a default."""
    is_square = entry.shape[-2] == entry.shape[-1]
    default = "expm" if is_square or jnp.issubdtype(entry.dtype, jnp.complexfloating) else "householder"
    return ORTHOGONAL_MAPS.get(entry.orthogonal_map or "", default)


def _require_known_map(stage: Orthogonal, original: Array, entry: Entry) -> None:
    """Raises an error if torch's map for a matrix is unknown, unless the matrix still equals its base."""
    default_map = _torch_map(entry)
    is_known = entry.orthogonal_map is not None or default_map == stage.map
    if is_known or not jnp.any(jnp.tril(_as_tall(original), -1)):
        return
    name_in_torch = {name: torch_name for torch_name, name in ORTHOGONAL_MAPS.items()}
    raise ValueError(
        f"a state dict does not record the map of torch's `orthogonal`: {stage!r} has map={stage.map!r}, but torch "
        f"uses {name_in_torch[default_map]!r} for the shape {entry.shape[-2:]} by default. Pass "
        f"orthogonal_map='default' if `orthogonal` was called without a map, or "
        f"orthogonal_map={name_in_torch[stage.map]!r} if it was called with this map."
    )


def _with_base_at_weight(w: Array) -> Values:
    """Returns raw values with the weight as ``base`` and zeros as ``x``, for which every map returns the weight."""
    w = widened(w)
    return {"x": jnp.zeros_like(w), "base": w}


def _write_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Converts raw values ``x`` and ``base`` to torch's original and square base, which give the same weight."""
    x, base = _as_tall(widened(values["x"])), _as_tall(widened(values["base"]))
    square = jnp.concatenate([base, jnp.linalg.qr(base, mode="complete")[0][..., base.shape[-1] :]], axis=-1)
    original = _as_lower(stage, product(adjoint(square), x)) - identity(x)
    return {"x": _transpose_like(original, values["x"]), "base": square}


def _has_identity_base(values: Values) -> bool:
    """Returns whether the base is the identity, as in torch without trivialization."""
    base = _as_tall(values["base"])
    return bool(jnp.array_equal(base, identity(base)))


def _write_reflections(w: Array) -> Array:
    """Converts a weight to torch's original for reflections without a base: LAPACK's factors of a QR decomposition."""
    reflections, taus = jnp.linalg.qr(_as_tall(w), mode="raw")
    factors = reflections.mT
    signs = jnp.sign(jnp.diagonal(factors, axis1=-2, axis2=-1)) * jnp.where(taus == 0, -1, 1)
    diagonal = identity(factors) * jnp.expand_dims(signs, -2)
    return _transpose_like(jnp.tril(factors, -1) + diagonal, w)


def _read_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Converts torch's values to raw values ``x`` and ``base`` of the same weight. A missing base is the identity."""
    original = _as_tall(widened(values["x"]))
    base, x = identity(original), jnp.tril(original, -1)
    if "base" in values:
        square = widened(values["base"])
        base, x = square[..., : base.shape[-1]], product(square, x)
    diagonal = jnp.expand_dims(jnp.diagonal(original, axis1=-2, axis2=-1), -2)
    if stage.map == "householder":
        signs = _signs_in_torch(diagonal)
        base, x = -base * signs, -x * signs
    elif jnp.iscomplexobj(x):
        x = x + base * (diagonal - diagonal.conj()) / 2
    return {"x": _transpose_like(x, values["x"]), "base": _transpose_like(base, values["x"])}


def _signs_in_torch(diagonal: Array) -> Array:
    """Returns the signs of reflections as torch reads them: the integer parts of the numbers on the diagonal."""
    signs = jnp.trunc(diagonal)
    if not jnp.all(jnp.abs(signs) == 1):
        raise ValueError(
            "the diagonal must hold the signs -1 or 1 of reflections, but holds numbers that torch reads as zeros, as "
            "after weight decay. Set each of them to -1 or 1."
        )
    return signs


def _as_lower(stage: Orthogonal, x: Array) -> Array:
    """Returns the lower triangular matrix that, with the identity as the base, gives the same rotation as ``x``."""
    if stage.map == "householder":
        return jnp.tril(x, -1)
    columns = x.shape[-1]
    top = x[..., :columns, :]
    lower = jnp.tril(x.at[..., :columns, :].add(-adjoint(top)), -1)
    if jnp.iscomplexobj(x):
        phases = jnp.expand_dims(jnp.diagonal(top - adjoint(top), axis1=-2, axis2=-1), -2) / 2
        lower = lower + identity(x) * phases
    return lower


def _as_tall(x: Array) -> Array:
    """Returns ``x``, transposed if it has more columns than rows."""
    return x.mT if x.shape[-2] < x.shape[-1] else x


def _transpose_like(x: Array, like: Array) -> Array:
    """Returns ``x``, transposed if ``like`` has more columns than rows."""
    return x.mT if like.shape[-2] < like.shape[-1] else x
