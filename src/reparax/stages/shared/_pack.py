"""Stages that store the arrays of a cell in another layout: ``Pack``, ``Split``, and ``CudnnLSTM``.

The *model's arrays* are the arrays that the model reads, and the *raw arrays* are the trained ones. Both hold the same
values. The module ``_cells`` explains values, blocks and layouts, and converts between them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.config import changed_arguments
from reparax.core.fields import field
from reparax.core.leaf import Reparametrization
from reparax.core.paths import describe
from reparax.core.raw import OTHER_CHAIN, Flat, Leaf, Node
from reparax.core.site import Site, site_of
from reparax.core.values import OTHERS, RawValues, Values, main
from reparax.core.where import match_paths, nearest
from reparax.numerics.arguments import check_integer
from reparax.stages.shared._cells import (
    Block,
    Concat,
    Sizes,
    blocks_of,
    cut_values,
    is_optional,
    join_values,
    read_values,
    require_unique,
    value_names,
    value_texts,
    write_arrays,
)


class _Rearranged(Parametrization):
    """The base class of ``Pack`` and ``Split``, which convert between the raw arrays and the arrays of the model.

    In the raw tree, a node (a marker dict) replaces each model array. A raw array is stored in the node of the model
    array that holds its first value. The other nodes are empty.
    """

    layout: Any
    where: str = field(default="", kw_only=True)
    sizes: Any = field(default=(), kw_only=True)

    raw_values: ClassVar[Values] = {OTHERS: main(part=True)}
    _is_layout: ClassVar[Any] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", _layout_as_field(self.layout))
        object.__setattr__(self, "sizes", _check_sizes(self.sizes, type(self).__name__))
        where: Any = self.where
        if not isinstance(where, str):
            raise TypeError(
                f"{type(self).__name__} takes a string as `where`, a path or a regular expression, but got {where!r}."
            )
        model_names = [name for block in self._model.values() for name in value_names(block)]
        stored_names = [name for block in self._stored.values() for name in value_names(block)]
        require_unique(model_names, type(self).__name__)
        require_unique([_label(path) for path in self._stored], type(self).__name__)
        if unshared := sorted(set(model_names) ^ set(stored_names)):
            raise ValueError(
                f"{type(self).__name__} got two layouts, but only one of them holds {unshared[0]!r}. Choose two that "
                f"hold the same values, or change the model's parameters with `convert` first."
            )

    def __repr__(self) -> str:
        def text(value: Any) -> str:
            return repr(dict(value) if isinstance(value, tuple) else value)

        arguments = changed_arguments(self)
        layout = text(arguments.pop("layout"))
        return f"{type(self).__name__}({', '.join([layout, *(f'{name}={text(x)}' for name, x in arguments.items())])})"

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns one site (the arrays that the stage transforms together) per cell.

        During ``init``, a site holds the model's arrays; afterwards, it holds the nodes that replace them.
        """
        who = CallName(self, method)
        if method == "init":
            cells = self._find_cells(who, [leaf for leaf in tree.leaves() if leaf.visible and leaf.is_there])
            return [site_of(self, who.at(cell) if cell else who, arrays) for cell, arrays in cells.items()]
        nodes = tree.own_nodes(who, self.kind)
        leaves = [leaf for leaf in tree.with_nodes(nodes).leaves() if leaf.visible and leaf.is_there]
        sites: list[Site] = []
        for cell, arrays in self._find_cells(who, [leaf for leaf in leaves if isinstance(leaf.content, Node)]).items():
            who_here = who.at(cell) if cell else who
            with locate_errors(who_here):
                for leaf in arrays.values():
                    leaf.content.arrays(may_be_none=True)
            copies = {_path_below(cell, path): (_path_below(cell, home),) for path, home in self._copies.items()}
            sites.append(site_of(self, who_here, arrays, copies=copies))
        return sites

    def _find_cells(self, who: CallName, leaves: Sequence[Leaf]) -> dict[str, dict[str, Leaf]]:
        """Maps the path of each cell that ``where`` selects to a dict of the cell's arrays by their paths within it."""
        candidates = [(_cell_above(path, leaf.path), path, leaf) for leaf in leaves for path in self._model]
        all_cells = [cell for cell, _, _ in candidates if cell is not None]
        selected = {match[0] for match in match_paths(self.where, all_cells)}
        cells: dict[str, dict[str, Leaf]] = {}
        for cell, path, leaf in candidates:
            if cell not in selected:
                continue
            arrays = cells.setdefault(cell, {})
            if path in arrays:
                raise ValueError(
                    f"{who.at(cell) if cell else who}: a later stage replaces {path!r} by several raw values, so it "
                    f"cannot be part of a block. Put that stage earlier in the chain."
                )
            arrays[path] = leaf
        if not cells:
            path_of_first = _path_below(self.where, next(iter(self._model)))
            raise ValueError(
                f"{who} found no array {path_of_first!r}; the nearest paths are "
                f"{nearest(path_of_first, [leaf.path for leaf in leaves])}. Pass the path of the cell as `where`, or a "
                f"layout that names these arrays."
            )
        return cells

    def _init_at(self, site: Site, arrays: Mapping[str, Array], key: Array | None) -> RawValues:
        del site, key
        sizes = dict(self.sizes)
        stored = write_arrays(self._stored, read_values(self._model, arrays, sizes), sizes)
        return {path: {_label(name): stored[name] for name in stored if self._home(name) == path} for path in arrays}

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Array]:
        del site, key
        sizes = dict(self.sizes)
        effective = write_arrays(self._model, read_values(self._stored, self._raw_arrays(values), sizes), sizes)
        if lacking := sorted(effective.keys() ^ values.keys()):
            raise ValueError(
                f"found nothing at {lacking[0]!r}, where `init` leaves {{'@{self.kind}': {{}}}}. Flattened formats "
                f"lose empty nodes, so restore into the structure of `jax.eval_shape(p.init, params)`."
            )
        return effective

    @property
    @abstractmethod
    def _model(self) -> dict[str, Block]:
        """The layout of the arrays that the model reads."""

    @property
    @abstractmethod
    def _stored(self) -> dict[str, Block]:
        """The layout of the raw arrays, which are the trained arrays."""

    @property
    def _copies(self) -> dict[str, str]:
        """Maps the path of each model array that is cut from a raw array to the path where that raw array is stored."""
        return {}

    def _raw_arrays(self, nodes: Mapping[str, Any]) -> dict[str, Array]:
        """Collects the raw arrays by their paths in the layout, and raises an error if any is unexpected or missing."""
        paths = {_label(path): path for path in self._stored}
        arrays = {name: x for node in nodes.values() if node is not None for name, x in node.items()}
        for name, x in arrays.items():
            if name not in paths:
                raise ValueError(f"got an unexpected raw value {name!r}, {describe(x)}: {OTHER_CHAIN}")
        for name, path in paths.items():
            if name not in arrays and not is_optional(self._stored[path]):
                raise ValueError(f"the raw value {name!r} is missing: {OTHER_CHAIN}")
        return {paths[name]: x for name, x in arrays.items()}

    def _home(self, raw_path: str) -> str:
        """Returns the path of the model array whose node stores the given raw array."""
        first_value = value_names(self._stored[raw_path])[0]
        return next(path for path, block in self._model.items() if first_value in value_names(block))


def _path_below(cell: str, path: str) -> str:
    """Converts ``path``, which is relative to a cell, to a path in the whole tree."""
    return f"{cell}/{path}" if cell else path


def _cell_above(path: str, full_path: str) -> str | None:
    """Strips ``path`` from the end of ``full_path`` to get the cell's path, or returns None if it is not at the end."""
    if full_path == path:
        return ""
    return full_path.removesuffix(f"/{path}") if full_path.endswith(f"/{path}") else None


def _label(path: str) -> str:
    """Converts the path of a raw array to its name in a node, which may contain neither '/' nor '.'."""
    return path.replace("/", "_").replace(".", "_")


def _layout_as_field(layout: Any) -> str | tuple[tuple[str, Block], ...]:
    """Converts a layout to the form that the field stores: its name, or pairs of paths and blocks."""
    blocks = blocks_of(layout)
    return layout if isinstance(layout, str) else tuple(blocks.items())


def _check_sizes(sizes: Any, who: str) -> tuple[tuple[str, int], ...]:
    """Converts sizes to pairs of names and integers, and raises an error if they are malformed."""
    if not isinstance(sizes, Mapping | tuple | list):
        raise TypeError(f"{who} takes `sizes` as a dict such as {{'heads': 8}}, but got {sizes!r}.")
    return tuple(sorted((name, check_integer(size, who, name)) for name, size in dict(sizes).items()))


def _one_array_each(layout: Mapping[str, Block]) -> dict[str, Block]:
    """Returns a layout that stores each value of ``layout`` as a separate array, under the value's name."""
    return {value_names(text)[0]: text for block in layout.values() for text in value_texts(block)}


class Pack(_Rearranged):
    r"""Assembles arrays that the model reads from trained parts: :math:`W = [W_i; W_f; W_g; W_o]`.

    In place of each array, the raw tree stores its parts, such as ``input_i`` (all main). Each part has its own path
    (``lstm/weight_ih/input_i``), so that earlier stages can select single parts. ``init`` splits the array, and each
    call of ``apply`` assembles it once, outside any loop over time. Both only move entries, so they are exact.

    Args:
      layout: The layout of the arrays that the model reads: a name, such as ``"haiku.lstm"``, or a dict of paths and
        blocks (:class:`Concat`, :func:`gates`). Arrays of biases may be missing.
      where: The path of the cell that holds these arrays, or a regular expression for several cells.
      sizes: Sizes that the shapes do not determine, such as ``{"heads": 8}``.

    Raises:
      TypeError: If ``where`` is not a string, or if ``layout`` or ``sizes`` has the wrong type.
      ValueError: If ``layout`` is an unknown name, or if it names a value twice.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.shared.Pack("haiku.lstm", where="lstm")
      >>> raw = p.init({"lstm": {"linear": {"w": jnp.ones((5, 8)), "b": jnp.ones(8)}}})
      >>> {name: x.shape for name, x in raw["lstm"]["linear"]["w"]["@pack"].items() if name.endswith("_f")}
      {'input_f': (3, 2), 'hidden_f': (2, 2)}
      >>> dropped = rpx.WeightDropout(0.5, where="lstm/linear/w/hidden_.*") >> p  # hidden-to-hidden only
    """

    @property
    def _model(self) -> dict[str, Block]:
        return blocks_of(self.layout)

    @property
    def _stored(self) -> dict[str, Block]:
        return _one_array_each(self._model)


class Split(_Rearranged):
    r"""Trains concatenated blocks and splits them into the arrays of the model: :math:`[W_i; W_h; b^T] = W`.

    The raw tree stores the blocks (all main), under the names in ``layout``. Each block replaces the array that holds
    its first part, and its path is the path of that array followed by the name of the block (``cell/Wi/W``). An empty
    node, ``{"@split": {}}``, replaces every other array. Gradients and optimizer states have the shapes of the blocks.
    ``init`` joins the parts, and ``apply`` splits the blocks. Both only move entries, so they are exact.

    Args:
      layout: The layout of the raw arrays: a dict of names and blocks, or a name, such as ``"equinox.lstm"``.
      where: The path of the cell that holds the parts, or a regular expression for several cells.
      model: The layout of the arrays that the model reads, in the same forms, such as ``"flax.lstm"``. If None, each
        value of the raw blocks is a separate array of the model, whose path is the name of the value.
      sizes: Sizes that the shapes of the raw arrays do not determine.

    Raises:
      TypeError: If ``where`` is not a string, or if ``layout``, ``model`` or ``sizes`` has the wrong type.
      ValueError: If a layout is an unknown name, if it names a value twice, or if the two layouts hold different
        values.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.shared.Split({"W": rpx.shared.Concat(("Wi: 3 8", "Wh: 2 8", "b: 8 -> 1 8"))}, where="cell")
      >>> raw = p.init({"cell": {"Wi": jnp.ones((3, 8)), "Wh": jnp.ones((2, 8)), "b": jnp.ones(8)}})
      >>> jax.tree.map(jnp.shape, raw)
      {'cell': {'Wh': {'@split': {}}, 'Wi': {'@split': {'W': (6, 8)}}, 'b': {'@split': {}}}}
      >>> rpx.shared.Split("equinox.lstm", where="cell", model="flax.lstm")
      Split('equinox.lstm', model='flax.lstm', where='cell')
    """

    model: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", None if self.model is None else _layout_as_field(self.model))
        super().__post_init__()

    @property
    def _model(self) -> dict[str, Block]:
        return _one_array_each(self._stored) if self.model is None else blocks_of(self.model)

    @property
    def _stored(self) -> dict[str, Block]:
        return blocks_of(self.layout)

    @property
    def _copies(self) -> dict[str, str]:
        holder = {name: raw_path for raw_path, block in self._stored.items() for name in value_names(block)}
        raw_paths = {path: holder[value_names(block)[0]] for path, block in self._model.items()}
        return {path: f"{self._home(raw_path)}/{_label(raw_path)}" for path, raw_path in raw_paths.items()}


class CudnnLSTM(Reparametrization):
    r"""Assembles the flat weight vector of :func:`jax.experimental.rnn.lstm` from separate gates.

    For each gate ``i``, ``f``, ``g``, ``o``, each layer and each direction, the raw tree stores (as main values with
    their own paths) the kernels ``input_i_l0`` of shape ``(inputs, hidden_size)`` and ``hidden_i_l0`` of shape
    ``(hidden_size, hidden_size)``, and the biases ``bias_i_l0`` and ``hidden_bias_i_l0`` of shape ``(hidden_size,)``.
    Names of the backward direction end in ``_reverse``. ``init`` splits the vector, which is exact with ``biases=2``.
    With ``biases=1``, ``init`` sums the two biases, so that the network computes the same function; with ``biases=0``,
    it drops them.

    Args:
      input_size: The number of inputs of the first layer.
      hidden_size: The number of hidden units in each direction.
      num_layers: The number of layers.
      bidirectional: Whether each layer runs in both directions.
      biases: The number of trained biases per gate: 2, as in cuDNN, which adds them; 1, as in flax and equinox; or 0.
        The vector holds zeros for the other biases.
      where: Which arrays to act on. Default: floating vectors of the right size.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``input_size``, ``hidden_size``, ``num_layers`` or ``biases`` is not an integer.
      ValueError: If a size is less than 1, or if ``biases`` is not 0, 1 or 2.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> from jax.experimental import rnn
      >>> p = rpx.shared.CudnnLSTM(3, 2)
      >>> weights = rnn.init_lstm_weight(jax.random.key(0), 3, 2, 1, False)
      >>> raw = p.init({"weights": weights})["weights"]["@cudnn_lstm"]
      >>> raw["input_f_l0"].shape, raw["hidden_f_l0"].shape, raw["bias_f_l0"].shape
      ((3, 2), (2, 2), (2,))

    References:
      Appleyard, Kociský and Blunsom, *Optimizing Performance of Recurrent Neural Networks on GPUs*, 2016.
    """

    input_size: int = field(check_integer)
    hidden_size: int = field(check_integer)
    num_layers: int = field(check_integer, default=1, kw_only=True)
    bidirectional: bool = field(default=False, kw_only=True)
    biases: int = field(check_integer, default=2, kw_only=True)

    raw_values: ClassVar[Values] = {OTHERS: main(part=True)}
    dtypes: ClassVar[Any] = jnp.floating

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.input_size, self.hidden_size, self.num_layers) < 1 or self.biases not in (0, 1, 2):
            raise ValueError(f"{self!r} got a size below 1, or a number of biases other than 0, 1 or 2.")

    def default(self, w: Array) -> bool:
        return super().default(w) and w.shape == (self._size,)

    def refuse_leaf(self, w: Array) -> str | None:
        if w.shape == (self._size,):
            return None
        return (
            f"expected a vector of {self._size} weights, but got shape {w.shape}. Pass the sizes of the network that "
            f"has these weights, or exclude this array with `where`."
        )

    def init_leaf(self, w: Array) -> dict[str, Array]:
        values = cut_values(self._block, w, self._sizes)
        if self.biases == 2:
            return values
        kernels = {name: value for name, value in values.items() if "bias" not in name}
        if self.biases == 0:
            return kernels
        first_biases = {name: value for name, value in values.items() if name.startswith("bias")}
        return kernels | {name: value + values[f"hidden_{name}"] for name, value in first_biases.items()}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        biases = [name for name in value_names(self._block) if "bias" in name]
        kernel = next(name for name in value_names(self._block) if name not in biases)
        zeros = {name: jnp.zeros(self.hidden_size, values[kernel].dtype) for name in biases}
        return join_values(self._block, zeros | values, self._sizes)

    @property
    def _sizes(self) -> Sizes:
        """The sizes that the names of axes in ``_block`` stand for."""
        return {"n": self.input_size, "h": self.hidden_size, "m": self.hidden_size * (1 + self.bidirectional)}

    @property
    def _size(self) -> int:
        """The number of weights of all gates, layers and directions."""
        n, h, m = (self._sizes[name] for name in "nhm")
        return 4 * h * (m // h) * (n + (self.num_layers - 1) * m + self.num_layers * (h + 2))

    @property
    def _block(self) -> Concat:
        """The block that describes the vector: all kernels, layer by layer, followed by all biases."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        ends = [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

        def texts(source: str, end: str, shape: str) -> list[str]:
            return [f"{source}_{gate}_{end}: {shape}" for gate in "ifgo"]

        kernels: list[str] = []
        biases: list[str] = []
        for end in ends:
            inputs = "n" if end.startswith("l0") else "m"
            kernels += texts("input", end, f"{inputs} h -> (h {inputs})") + texts("hidden", end, "h' h -> (h h')")
            biases += texts("bias", end, "h") + texts("hidden_bias", end, "h")
        return Concat((*kernels, *biases))
