"""Mistakes of new users, and what each of them reads: who and where, what was expected, what came, what to do.

Nothing is computed: an error of structure needs shapes alone. Dtypes and ranks promote as they do for users: the strict
ones of all other tests would stop a transformation of optax before it meets the mistake.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises
from public import PUBLIC

import reparax as rpx
from reparax._core.names import OF_OTHERS, how_to_write
from reparax._core.words import OF_OTHERS as ARGUMENTS
from reparax._tree.raw import holds_markers
from reparax.testing import check_laws

PARAMS = {
    "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    "out": {"kernel": np.ones((2, 4), np.float32)},
}
X = np.ones((5, 3), np.float32)
NORM, P, LORA = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
ADAM, SGD = rpx.optimizer(optax.adam(1e-3)), rpx.optimizer(optax.sgd(0.1))


def zeros(init, *args):
    """What ``init`` gives, with zeros for numbers."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(init, *args))


KEY = np.zeros(2, np.uint32)
RAW, ADAPTED = zeros(NORM.init, PARAMS), zeros(LORA.init, PARAMS, KEY)
OTHER, ROWS = zeros(rpx.SpectralNorm().init, PARAMS), zeros(rpx.WeightNorm(axis=0).init, PARAMS)
STATE, OF_MODEL = zeros(ADAM.init, RAW), zeros(ADAM.init, PARAMS)
TWICE = jax.tree.map(lambda x: np.stack([x, x]), RAW)
GOOD = {"@weight_norm": {"g": np.zeros((1, 4)), "v": np.zeros((2, 4))}}


def loss(params, x):
    return jnp.sum((x @ params["dense"]["kernel"] + params["dense"]["bias"]) @ params["out"]["kernel"])


def positive(path, array):
    return jnp.asarray(array) > 0


def said(path, array):
    return "kernel"


def step(tx, *args):
    """A step of an optimizer under ``jit``, whose program is not compiled."""
    return jax.eval_shape(tx.update, *args)


# A step of an optimizer.
STEPS = {
    "gradients of the model": (
        lambda: step(ADAM, PARAMS, STATE, RAW),
        ValueError,
        "optimizer.update takes gradients of the raw tree, but got those of the model's own parameters: "
        "expected '@weight_norm' at 'dense/kernel', got an array. Differentiate with respect to the raw "
        "tree: `jax.grad(lambda raw: loss(p.apply(raw)))(raw)`.",
    ),
    "gradients of the model without jit": (
        lambda: ADAM.update(PARAMS, STATE, RAW),
        ValueError,
        "optimizer.update takes gradients of the raw tree, but got those of the model's own parameters: "
        "expected '@weight_norm' at 'dense/kernel', got an array. Differentiate with respect to the raw "
        "tree: `jax.grad(lambda raw: loss(p.apply(raw)))(raw)`.",
    ),
    "gradients of the model for sgd": (
        lambda: step(SGD, PARAMS, zeros(SGD.init, RAW), RAW),
        ValueError,
        "optimizer.update takes gradients of the raw tree, but got those of the model's own parameters: "
        "expected '@weight_norm' at 'dense/kernel', got an array. Differentiate with respect to the raw "
        "tree: `jax.grad(lambda raw: loss(p.apply(raw)))(raw)`.",
    ),
    "gradients and parameters of the model": (
        lambda: step(ADAM, PARAMS, STATE, PARAMS),
        ValueError,
        "optimizer.update takes gradients and parameters of the raw tree that its state belongs to, but "
        "got those of the model: expected '@weight_norm' at '0/mu/dense/kernel', got an array. "
        "Differentiate with respect to `raw`, and call `tx.update(grads, state, raw)`.",
    ),
    "parameters of the model": (
        lambda: step(ADAM, RAW, STATE, PARAMS),
        ValueError,
        "optimizer.update takes the raw tree as params, but got the model's own parameters: expected "
        "'@weight_norm' at 'dense/kernel', got an array. Call `tx.update(grads, state, raw)`.",
    ),
    "a state of the model": (
        lambda: step(ADAM, RAW, OF_MODEL, RAW),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got that of the model's own parameters: "
        "expected '@weight_norm' at '0/mu/dense/kernel', got an array. Make it from the raw tree, "
        "`tx.init(raw)`.",
    ),
    "a state of the model without jit": (
        lambda: ADAM.update(RAW, OF_MODEL, RAW),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got that of the model's own parameters: "
        "expected '@weight_norm' at '0/mu/dense/kernel', got an array. Make it from the raw tree, "
        "`tx.init(raw)`.",
    ),
    "a state of the model without parameters": (
        lambda: step(ADAM, RAW, OF_MODEL),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got that of the model's own parameters: "
        "expected '@weight_norm' at '0/mu/dense/kernel', got an array. Make it from the raw tree, "
        "`tx.init(raw)`.",
    ),
    "a state of another chain": (
        lambda: step(ADAM, RAW, zeros(ADAM.init, OTHER), RAW),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got that of another chain: expected "
        "'@weight_norm' at '0/mu/dense/kernel', got '@spectral_norm'. Make a new one, `tx.init(raw)`, or "
        "convert it, `rpx.transfer(old, new, state, like=old_raw)`.",
    ),
    "a state of other axes": (
        lambda: step(ADAM, RAW, zeros(ADAM.init, ROWS), RAW),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got one of other shapes: expected shape (1, "
        "2) at '0/mu/dense/kernel/@weight_norm/g', got shape (3, 1). Make it with the same `tx`, "
        "`tx.init(raw)`.",
    ),
    "a state of another optimizer": (
        lambda: step(ADAM, RAW, zeros(SGD.init, RAW), RAW),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got that of another optimizer or model: "
        "expected an array at '0/count', got nothing. Make it with the same `tx`, `tx.init(raw)`.",
    ),
    "a state of optax alone": (
        lambda: step(ADAM, ADAPTED, zeros(optax.adam(1e-3).init, ADAPTED), ADAPTED),
        ValueError,
        "optimizer.update takes the state of the raw tree, but got one with values for what is fixed: "
        "expected nothing at '0/mu/dense/kernel/@lora/@fixed/w/@freeze/@fixed/w', got an array. Make it with the same "
        "`tx`, `tx.init(raw)`.",
    ),
    "state and gradients swapped": (
        lambda: step(ADAM, STATE, RAW, RAW),
        ValueError,
        "optimizer.update takes gradients first, but got a tuple. Call `tx.update(grads, state, raw)`. "
        "`jax.value_and_grad` returns the value too: `value, grads = ...`.",
    ),
    "raw tree and state swapped": (
        lambda: step(ADAM, RAW, RAW, STATE),
        ValueError,
        "optimizer.update takes the raw tree last, but got a tuple. Call `tx.update(grads, state, raw)`.",
    ),
    "no state": (
        lambda: step(ADAM, RAW, RAW),
        ValueError,
        "optimizer.update takes a state second, but got a raw tree. Call `tx.update(grads, state, raw)`.",
    ),
    "value and gradients": (
        lambda: step(ADAM, (np.zeros(()), RAW), STATE, RAW),
        ValueError,
        "optimizer.update takes gradients first, but got a tuple. Call `tx.update(grads, state, raw)`. "
        "`jax.value_and_grad` returns the value too: `value, grads = ...`.",
    ),
    "gradients of a batch": (
        lambda: step(ADAM, TWICE, STATE, RAW),
        ValueError,
        "optimizer.update takes gradients of the raw tree, but got those of other shapes: expected shape "
        "(2,) at 'dense/bias', got shape (2, 2). Differentiate one number, such as the mean of the loss "
        "over a batch.",
    ),
    "gradients of a batch for sgd": (
        lambda: step(SGD, TWICE, zeros(SGD.init, RAW), RAW),
        ValueError,
        "optimizer.update takes gradients of the raw tree, but got those of other shapes: expected shape "
        "(2,) at 'dense/bias', got shape (2, 2). Differentiate one number, such as the mean of the loss "
        "over a batch.",
    ),
    "chain and transformation": (
        lambda: rpx.optimizer(P, optax.adam(1e-3)),
        TypeError,
        "optimizer got 2 arguments by position, but takes 1. Write `rpx.optimizer(tx)`.",
    ),
    "a chain": (
        lambda: rpx.optimizer(P),
        TypeError,
        "optimizer takes an optax transformation, but got a value of type 'Chain'. Pass one, as in "
        "`rpx.optimizer(optax.adam(1e-3))`.",
    ),
    "a function": (
        lambda: rpx.optimizer(optax.adam),
        TypeError,
        "optimizer takes an optax transformation, but got a value of type 'function'. Pass one, as in "
        "`rpx.optimizer(optax.adam(1e-3))`.",
    ),
    "a state of a chain": (
        lambda: ADAM.init(P),
        TypeError,
        "optimizer.init takes a raw tree, but got WeightNorm() >> VarNoise(0.1). Write `tx.init(p.init(params))`.",
    ),
}

# Chains and stages.
CHAINS = {
    "a class first": (
        lambda: rpx.WeightNorm >> rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm >> VarNoise(0.1): expected a stage, but got the class WeightNorm. Write `WeightNorm()`.",
    ),
    "a class last": (
        lambda: rpx.WeightNorm() >> rpx.VarNoise,
        TypeError,
        "WeightNorm() >> VarNoise: expected a stage, but got the class VarNoise. Write `VarNoise(std)`.",
    ),
    "a sum": (
        lambda: rpx.WeightNorm() + rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm() + VarNoise(0.1): stages are joined by `>>`, first the one that acts on the raw "
        "values. Write `WeightNorm() >> VarNoise(0.1)`.",
    ),
    "an or": (
        lambda: rpx.WeightNorm() | rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm() | VarNoise(0.1): stages are joined by `>>`, first the one that acts on the raw "
        "values. Write `WeightNorm() >> VarNoise(0.1)`.",
    ),
    "a matrix product": (
        lambda: rpx.WeightNorm() @ rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm() @ VarNoise(0.1): stages are joined by `>>`, first the one that acts on the raw "
        "values. Write `WeightNorm() >> VarNoise(0.1)`.",
    ),
    "a product": (
        lambda: rpx.WeightNorm() * rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm() * VarNoise(0.1): stages are joined by `>>`, first the one that acts on the raw "
        "values. Write `WeightNorm() >> VarNoise(0.1)`.",
    ),
    "the other direction": (
        lambda: rpx.WeightNorm() << rpx.VarNoise(0.1),
        TypeError,
        "WeightNorm() << VarNoise(0.1): stages are joined by `>>`, first the one that acts on the raw "
        "values. Write `WeightNorm() >> VarNoise(0.1)`.",
    ),
    "sum of a list": (
        lambda: sum([rpx.WeightNorm(), rpx.VarNoise(0.1)]),
        TypeError,
        "0 + WeightNorm(): expected a stage, but got 0 of type int. Join stages alone: `rpx.WeightNorm() "
        ">> rpx.VarNoise(0.1)`.",
    ),
    "a function": (
        lambda: rpx.WeightNorm() >> jnp.tanh,
        TypeError,
        "WeightNorm() >> tanh: expected a stage, but got a function. Make a stage of it, "
        "`rpx.numbers.Elementwise(function, its_inverse)`, or call it on the weights.",
    ),
    "a function first": (
        lambda: jnp.tanh >> rpx.WeightNorm(),
        TypeError,
        "tanh >> WeightNorm(): expected a stage, but got a function. Make a stage of it, "
        "`rpx.numbers.Elementwise(function, its_inverse)`, or call it on the weights.",
    ),
    "None": (
        lambda: rpx.WeightNorm() >> None,
        TypeError,
        "WeightNorm() >> None: expected a stage, but got None of type NoneType. Join stages alone: "
        "`rpx.WeightNorm() >> rpx.VarNoise(0.1)`.",
    ),
    "a list": (
        lambda: rpx.WeightNorm() >> [rpx.VarNoise(0.1)],
        TypeError,
        "WeightNorm() >> list: expected a stage, but got a value of type list. Join stages alone: "
        "`rpx.WeightNorm() >> rpx.VarNoise(0.1)`.",
    ),
    "arguments of Chain": (
        lambda: rpx.Chain(rpx.WeightNorm(), rpx.VarNoise(0.1)),
        TypeError,
        "Chain takes 1 of its arguments by position, but got 2. Write `a >> b`, or `rpx.Chain((a, b))`.",
    ),
    "a list for Chain": (
        lambda: rpx.Chain([rpx.WeightNorm()]),
        TypeError,
        "Chain takes a tuple of parametrizations, but got [WeightNorm()] of type list. Write `a >> b`, or "
        "`rpx.Chain((a, b))`.",
    ),
    "one stage for Chain": (
        lambda: rpx.Chain(rpx.WeightNorm()),
        TypeError,
        "Chain takes a tuple of parametrizations, but got WeightNorm() of type WeightNorm. Write `a >> b`, "
        "or `rpx.Chain((a, b))`.",
    ),
    "a class in Chain": (
        lambda: rpx.Chain((rpx.WeightNorm,)),
        TypeError,
        "Chain takes parametrizations, but got the class WeightNorm. Write `WeightNorm()`.",
    ),
    "a tree for Chain": (
        lambda: rpx.Chain(PARAMS),
        TypeError,
        "Chain takes a tuple of parametrizations, but got a value of type dict. Write `a >> b`, or "
        "`rpx.Chain((a, b))`.",
    ),
    "dim": (
        lambda: rpx.WeightNorm(dim=0),
        TypeError,
        "WeightNorm takes no argument 'dim'. Write `axis=`. torch's weights are (out, in), so its dim=0 is "
        "axis -1 of a kernel (in, out).",
    ),
    "n_power_iterations": (
        lambda: rpx.SpectralNorm(n_power_iterations=2),
        TypeError,
        "SpectralNorm takes no argument 'n_power_iterations'. Write `n_steps=`.",
    ),
    "orthogonal_map": (
        lambda: rpx.Orthogonal(orthogonal_map="cayley"),
        TypeError,
        "Orthogonal takes no argument 'orthogonal_map'. Write `map=`.",
    ),
    "r": (lambda: rpx.LoRA(r=8), TypeError, "LoRA takes no argument 'r'. Write `rank=`."),
    "lora_alpha": (
        lambda: rpx.LoRA(8, lora_alpha=16),
        TypeError,
        "LoRA takes no argument 'lora_alpha'. Write `alpha=`. As in PEFT, the rank divides it.",
    ),
    "target_modules": (
        lambda: rpx.LoRA(8, target_modules=["query"]),
        TypeError,
        "LoRA takes no argument 'target_modules'. Write `where=`. It matches whole paths: "
        "`where='.*(query|value)/kernel'`.",
    ),
    "p": (lambda: rpx.WeightDropout(p=0.5), TypeError, "WeightDropout takes no argument 'p'. Write `rate=`."),
    "stddev": (lambda: rpx.VarNoise(stddev=0.1), TypeError, "VarNoise takes no argument 'stddev'. Write `std=`."),
    "a mask": (lambda: rpx.Freeze(mask=".*"), TypeError, "Freeze takes no argument 'mask'. Write `where=`."),
    "a typing error": (
        lambda: rpx.WeightNorm(axes=0),
        TypeError,
        "WeightNorm takes no argument 'axes'. Write `axis=`.",
    ),
    "axis of a vector": (
        lambda: rpx.norms.Sphere(axis=0),
        TypeError,
        "Sphere takes no argument 'axis'. Write `along=`.",
    ),
    "an unknown argument": (
        lambda: rpx.WeightNorm(foo=1),
        TypeError,
        "WeightNorm takes no argument 'foo'. It takes axis, detach, where, stacked.",
    ),
    "no std": (lambda: rpx.VarNoise(), TypeError, "VarNoise needs 'std'. Write `VarNoise(std)`."),
    "where by position": (
        lambda: rpx.VarNoise(0.1, ".*kernel"),
        TypeError,
        "VarNoise takes 1 of its arguments by position, but got 2. Write the others by name: relative=, "
        "axis=, rank=, where=, stacked=.",
    ),
    "a module and a name": (
        lambda: rpx.WeightNorm(PARAMS, "weight"),
        TypeError,
        "WeightNorm takes 0 of its arguments by position, but got 2. Write the others by name: axis=, "
        "detach=, where=, stacked=.",
    ),
    "a rate in percent": (
        lambda: rpx.WeightDropout(50),
        ValueError,
        "WeightDropout got rate=50.0, but a rate is at least 0 and less than 1. It is the share of weights "
        "to drop, not to keep.",
    ),
    "a negative rate": (
        lambda: rpx.WeightDropout(-0.1),
        ValueError,
        "WeightDropout got rate=-0.1, but a rate is at least 0 and less than 1. It is the share of weights "
        "to drop, not to keep.",
    ),
    "a rate of one": (
        lambda: rpx.WeightDropout(1.0),
        ValueError,
        "WeightDropout got rate=1.0, but a rate is at least 0 and less than 1. It is the share of weights "
        "to drop, not to keep.",
    ),
    "a text as std": (
        lambda: rpx.VarNoise("0.1"),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got '0.1'.",
    ),
    "a schedule": (
        lambda: rpx.VarNoise(optax.linear_schedule(0.0, 1.0, 10)),
        TypeError,
        "VarNoise takes a number as std, but got a function. Call the schedule in the training step: "
        "`VarNoise(schedule(step))`.",
    ),
    "several numbers": (
        lambda: rpx.VarNoise(np.ones(3)),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got an array of dtype float64 and shape (3,).",
    ),
    "a float as rank": (lambda: rpx.LoRA(2.0), TypeError, "LoRA takes an integer as rank, but got 2.0."),
    "a tree as a word": (
        lambda: rpx.Orthogonal(PARAMS),
        ValueError,
        "Orthogonal takes map='cayley', 'expm' or 'householder', but got a dict of arrays.",
    ),
    "a list of ties": (
        lambda: rpx.Tie(["out/kernel", "dense/kernel"]),
        TypeError,
        "Tie takes a dict of target paths and their sources, but got ['out/kernel', 'dense/kernel'] of "
        "type list. Write `rpx.Tie({target: source})`.",
    ),
    "a misspelt tie": (
        lambda: rpx.Tie({"out/kernel": "dense/kernle"}).init(PARAMS),
        ValueError,
        "Tie({'out/kernel': 'dense/kernle'}).init found no array at 'dense/kernle'; the nearest paths are "
        "'dense/kernel', 'out/kernel', 'dense/bias'.",
    ),
    "a tie by dots": (
        lambda: rpx.Tie({"out.kernel": "dense.kernel"}).init(PARAMS),
        ValueError,
        "Tie({'out.kernel': 'dense.kernel'}).init found no array at 'dense.kernel'; the nearest paths are "
        "'dense/kernel', 'out/kernel', 'dense/bias'.",
    ),
    "an axis too many": (
        lambda: rpx.WeightNorm(axis=5).init(PARAMS),
        ValueError,
        "WeightNorm(axis=5).init at 'dense/kernel': axis=5 is out of bounds for an array of shape (3, 2). "
        "Leave it out with `where`, or use a separate stage for it.",
    ),
    "an unknown axis name": (
        lambda: rpx.WeightNorm(axis="out").init(PARAMS),
        ValueError,
        "WeightNorm(axis='out').init at 'dense/kernel': expected one axis named 'out', got no axis names. "
        "Give the axis by number, or leave the array out with `where`.",
    ),
    "stacked out of bounds": (
        lambda: rpx.WeightNorm(stacked=3).init(PARAMS),
        ValueError,
        "WeightNorm(stacked=3).init selects nothing: not counting stacked=3, its default takes "
        "none of the 3 arrays ('dense/bias', 'dense/kernel', 'out/kernel'). Correct `stacked`, or select "
        "some with `where`.",
    ),
    "a chain from a dict": (
        lambda: rpx.from_json({"stages": []}),
        ValueError,
        "from_json needs a string from `p.to_json()` in format 1, but got \"{'stages': []}\".",
    ),
    "a chain from a broken text": (
        lambda: rpx.from_json('{"reparax": 1, "sta'),
        ValueError,
        'from_json needs a string from `p.to_json()` in format 1, but got \'{"reparax": 1, "sta\'.',
    ),
    "a chain from a file name": (
        lambda: rpx.from_json("chain.json"),
        ValueError,
        "from_json needs a string from `p.to_json()` in format 1, but got 'chain.json'.",
    ),
    "a chain to a file": (
        lambda: P.to_json("chain.json"),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).to_json got 1 argument by position, but takes 0. Write `p.to_json()`.",
    ),
}

# Names of torch, optax and others.
NAMES = {
    "weight_norm": (lambda: rpx.weight_norm, AttributeError, "reparax has no 'weight_norm'. Write `rpx.WeightNorm`."),
    "var_noise": (lambda: rpx.var_noise, AttributeError, "reparax has no 'var_noise'. Write `rpx.VarNoise`."),
    "Lora": (lambda: rpx.Lora, AttributeError, "reparax has no 'Lora'. Write `rpx.LoRA`."),
    "Dropout": (lambda: rpx.Dropout, AttributeError, "reparax has no 'Dropout'. Write `rpx.WeightDropout(rate)`."),
    "chain": (lambda: rpx.chain, AttributeError, "reparax has no 'chain'. Write `a >> b`."),
    "init": (lambda: rpx.init, AttributeError, "reparax has no 'init'. It is a method of a chain: `p.init`."),
    "unwrap": (lambda: rpx.unwrap, AttributeError, "reparax has no 'unwrap'. Write `p.apply(raw)`."),
    "register_parametrization": (
        lambda: rpx.register_parametrization,
        AttributeError,
        "reparax has no 'register_parametrization'. Write a chain, `p = rpx.WeightNorm()`, and `raw = p.init(params)`.",
    ),
    "remove_parametrizations": (
        lambda: rpx.remove_parametrizations,
        AttributeError,
        "reparax has no 'remove_parametrizations'. Write `p.fold(raw)`.",
    ),
    "Parameterization": (
        lambda: rpx.Parameterization,
        AttributeError,
        "reparax has no 'Parameterization'. Write `rpx.Parametrization`.",
    ),
    "Toplitz": (
        lambda: rpx.Toplitz,
        AttributeError,
        "reparax has no 'Toplitz'. Write `rpx.matrices.Toeplitz`.",
    ),
    "module": (
        lambda: rpx.experimental,
        AttributeError,
        "reparax has no 'experimental'. `dir(reparax)` lists what it has and its families.",
    ),
    "private": (lambda: rpx.__wrapped__, AttributeError, "reparax has no '__wrapped__'."),
}

# What a stage acts on.
SELECTIONS = {
    "one argument": (
        lambda: rpx.WeightNorm(where=lambda path: True),
        TypeError,
        "WeightNorm got a function as where that does not take two arguments. It is called with the path, "
        "as text, and the array: `where=lambda path, array: array.ndim > 1`.",
    ),
    "no argument": (
        lambda: rpx.WeightNorm(where=lambda: True),
        TypeError,
        "WeightNorm got a function as where that does not take two arguments. It is called with the path, "
        "as text, and the array: `where=lambda path, array: array.ndim > 1`.",
    ),
    "an array": (
        lambda: rpx.WeightNorm(where=positive).init(PARAMS),
        TypeError,
        "WeightNorm(where=positive).init asked the function `where` about 'dense/bias', expected True or "
        "False, got bool[2]. Decide by the path, and by the shape and dtype of the array, not by its "
        "numbers.",
    ),
    "an array under jit": (
        lambda: jax.eval_shape(rpx.WeightNorm(where=positive).init, PARAMS),
        TypeError,
        "WeightNorm(where=positive).init asked the function `where` about 'dense/bias', expected True or "
        "False, got bool[2]. Decide by the path, and by the shape and dtype of the array, not by its "
        "numbers.",
    ),
    "a text": (
        lambda: rpx.WeightNorm(where=said).init(PARAMS),
        TypeError,
        "WeightNorm(where=said).init asked the function `where` about 'dense/bias', expected True or "
        "False, got 'kernel'. Decide by the path, and by the shape and dtype of the array, not by its "
        "numbers.",
    ),
    "a class": (
        lambda: rpx.WeightNorm(where=int),
        TypeError,
        "WeightNorm got where=<class 'int'> of type type, but takes a regular expression for the whole "
        "path or a predicate (path, array) -> bool. Write the paths of arrays of that class, such as "
        "'.*/kernel'.",
    ),
    "a list": (
        lambda: rpx.WeightNorm(where=["dense/kernel", "out/kernel"]),
        TypeError,
        "WeightNorm got where=['dense/kernel', 'out/kernel'] of type list, but takes a regular expression "
        "for the whole path or a predicate (path, array) -> bool. Join several by `|`: "
        "'dense/kernel|out/kernel'.",
    ),
    "a pattern": (
        lambda: rpx.WeightNorm(where=re.compile(".*kernel")),
        TypeError,
        "WeightNorm got where=re.compile('.*kernel') of type Pattern, but takes a regular expression for "
        "the whole path or a predicate (path, array) -> bool. Pass its text, '.*kernel'.",
    ),
    "a tree of booleans": (
        lambda: rpx.WeightNorm(where={"dense": True}),
        TypeError,
        "WeightNorm got where={'dense': True} of type dict, but takes a regular expression for the whole "
        "path or a predicate (path, array) -> bool. Wrap a tree of booleans in `rpx.selected`.",
    ),
    "a glob": (
        lambda: rpx.WeightNorm(where="*kernel*"),
        ValueError,
        "WeightNorm got where='*kernel*', which is not a regular expression: nothing to repeat at position "
        "0. Any text is `.*`, so write '.*kernel.*'.",
    ),
    "a glob that is an expression": (
        lambda: rpx.WeightNorm(where="dense/*").init(PARAMS),
        ValueError,
        "WeightNorm(where='dense/*').init selects nothing: no path matches 'dense/*' as a whole, as `*` "
        "alone does not stand for any text. Write 'dense/.*', which matches 2, such as 'dense/bias'.",
    ),
    "a part of the path": (
        lambda: rpx.WeightNorm(where="kernel").init(PARAMS),
        ValueError,
        "WeightNorm(where='kernel').init selects nothing: no path matches 'kernel' as a whole, but the end "
        "of 2 does, such as 'dense/kernel'. Write '.*/kernel' for these.",
    ),
    "a layer": (
        lambda: rpx.WeightNorm(where="dense").init(PARAMS),
        ValueError,
        "WeightNorm(where='dense').init selects nothing: 'dense' is no array, but 2 paths begin with it. "
        "Write 'dense/.*' for these.",
    ),
    "a path with params in front": (
        lambda: rpx.WeightNorm(where="params/dense/kernel").init(PARAMS),
        ValueError,
        "WeightNorm(where='params/dense/kernel').init selects nothing: no path matches "
        "'params/dense/kernel' as a whole. The nearest of 3 paths are 'dense/kernel', 'out/kernel', "
        "'dense/bias'. Correct the expression; `.*` matches any text.",
    ),
    "a list for all_but": (
        lambda: rpx.all_but([".*bias"]),
        TypeError,
        "all_but takes regular expressions for whole paths, but got ['.*bias']. Pass strings.",
    ),
    "a path for selected": (
        lambda: rpx.selected("dense/kernel"),
        TypeError,
        "selected takes a tree of booleans, but got 'dense/kernel' at ''. Write True or False.",
    ),
    "a function for selected": (
        lambda: rpx.selected(positive),
        TypeError,
        "selected got a function without the model whose parts it returns. Pass the model too: "
        "`rpx.selected(lambda m: m.layers[0].weight, model)`.",
    ),
}

# Methods of chains.
CALLS = {
    "apply on parameters": (
        lambda: P.apply(PARAMS, KEY),
        ValueError,
        "WeightNorm().apply got a tree that never went through init: it holds no '@weight_norm'. Call `raw "
        "= p.init(params)` once, with the whole chain, and pass `raw`.",
    ),
    "init twice": (
        lambda: NORM.init(RAW),
        ValueError,
        "WeightNorm().init takes the model's own parameters, but got a raw tree: it holds '@weight_norm' "
        "at 'dense/kernel'. Call `init` once, with the whole chain, and pass its result to `apply`.",
    ),
    "apply without a key": (
        lambda: P.apply(RAW),
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).apply draws random numbers, so it needs a key, but got key=None. "
        "Pass a key, or evaluate with `p.deterministic`.",
    ),
    "apply with a number": (
        lambda: P.apply(RAW, 0),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply needs a PRNG key, but got 0 of type int. Make one with "
        "`jax.random.key(seed)`.",
    ),
    "apply with a generator of numpy": (
        lambda: P.apply(RAW, np.random.default_rng(0)),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply needs a PRNG key, but got a value of type Generator. Make "
        "one with `jax.random.key(seed)`.",
    ),
    "apply with rngs": (
        lambda: P.apply(RAW, {"params": KEY}),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply needs a PRNG key, but got a value of type dict. Make one "
        "with `jax.random.key(seed)`.",
    ),
    "apply with a word of flax": (
        lambda: P.apply(RAW, rngs=KEY),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply takes no argument 'rngs'. Write `p.apply(raw, key=None)`.",
    ),
    "apply with params": (
        lambda: P.apply(params=RAW),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply takes no argument 'params'. Write `p.apply(raw, key=None)`.",
    ),
    "apply on data": (
        lambda: NORM.apply(RAW, X),
        TypeError,
        "WeightNorm().apply needs a PRNG key, but got an array of dtype float32 and shape (5, 3). Make one "
        "with `jax.random.key(seed)`.",
    ),
    "apply on data, at random": (
        lambda: P.apply(RAW, X),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply needs a PRNG key, but got an array of dtype float32 and "
        "shape (5, 3). Make one with `jax.random.key(seed)`.",
    ),
    "key first": (
        lambda: P.apply(KEY, RAW),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).apply needs a PRNG key, but got a value of type dict. Make one "
        "with `jax.random.key(seed)`.",
    ),
    "init with the key first": (
        lambda: LORA.init(KEY, PARAMS),
        TypeError,
        "(Freeze() >> LoRA(2)).init needs a PRNG key, but got a value of type dict. Make one with "
        "`jax.random.key(seed)`.",
    ),
    "init without a key": (
        lambda: LORA.init(PARAMS),
        ValueError,
        "(Freeze() >> LoRA(2)).init draws random numbers, so it needs a key, but got key=None. Pass a key: "
        "`p.init(params, jax.random.key(0))`.",
    ),
    "init without parameters": (
        lambda: NORM.init(),
        TypeError,
        "WeightNorm().init needs 'params'. Write `p.init(params, key=None)`.",
    ),
    "init of nothing": (
        lambda: NORM.init({}),
        ValueError,
        "WeightNorm().init selects nothing: the tree holds no array. Pass the model's parameters.",
    ),
    "init of a class": (
        lambda: rpx.WeightNorm.init(PARAMS),
        TypeError,
        "init was called on a class, not on a stage. Build the stage first, `p = rpx.WeightNorm()`: "
        "`p.init(params, key=None)`.",
    ),
    "init of a class with a key": (
        lambda: rpx.LoRA.init(PARAMS, KEY),
        TypeError,
        "init was called on a class, not on a stage. Build the stage first, `p = rpx.WeightNorm()`: "
        "`p.init(params, key=None)`.",
    ),
    "apply of a class": (
        lambda: rpx.WeightNorm.apply(RAW),
        TypeError,
        "apply was called on a class, not on a stage. Build the stage first, `p = rpx.WeightNorm()`: "
        "`p.apply(raw, key=None)`.",
    ),
    "fold with a key": (
        lambda: P.fold(RAW, KEY),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).fold got 2 arguments by position, but takes 1. Write `p.fold(raw)`.",
    ),
    "update with gradients as key": (
        lambda: NORM.update(RAW, PARAMS),
        TypeError,
        "WeightNorm().update needs a PRNG key, but got a value of type dict. Make one with `jax.random.key(seed)`.",
    ),
    "check without parameters": (
        lambda: P.check(RAW),
        TypeError,
        "(WeightNorm() >> VarNoise(0.1)).check needs 'like'. Write `p.check(raw, like)`.",
    ),
    "owners of a raw tree": (
        lambda: P.owners(RAW),
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).owners takes the model's own parameters, but got a raw tree: it "
        "holds '@weight_norm' at 'dense/kernel'. Pass `params`.",
    ),
    "apply of another chain": (
        lambda: rpx.SpectralNorm().apply(RAW),
        ValueError,
        "SpectralNorm().apply found no '@spectral_norm' in a raw tree that holds '@weight_norm' at "
        "'dense/kernel': another chain made this raw tree. Apply the chain that made it; `p.check(raw, "
        "like=params)` lists every difference.",
    ),
    "apply of fewer stages": (
        lambda: rpx.VarNoise(0.1).apply(RAW, KEY),
        ValueError,
        "VarNoise(0.1).apply does not know '@weight_norm' at 'dense/kernel': another chain made this raw "
        "tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ),
    "apply with another axis": (
        lambda: rpx.WeightNorm(axis=0).apply(RAW),
        ValueError,
        "WeightNorm(axis=0).apply at 'dense/kernel': expected g of shape (3, 1), got (1, 2): another chain "
        "made this raw tree. Apply the chain that made it; `p.check(raw, like=params)` lists every "
        "difference.",
    ),
    "one value of another shape": (
        lambda: NORM.apply({"a": GOOD, "b": {"@weight_norm": {"g": np.ones((1, 3)), "v": np.ones((3, 2))}}}),
        ValueError,
        "WeightNorm().apply at 'b': expected g of shape (1, 2), got (1, 3): another chain made this raw "
        "tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ),
    "a list as a value": (
        lambda: NORM.apply({"b": {"@weight_norm": {"g": [1.0, 2.0], "v": np.ones((3, 2))}}}),
        ValueError,
        "WeightNorm().apply at 'b': expected an array as 'g', got a tree with '0', '1': another chain made "
        "this raw tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ),
    "a number as a value": (
        lambda: NORM.apply({"b": {"@weight_norm": {"g": 1.0, "v": np.ones((3, 2))}}}),
        ValueError,
        "WeightNorm().apply at 'b': expected an array as 'g', got float: another chain made this raw tree. "
        "Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ),
    "the free half": (
        lambda: LORA.apply(rpx.partition(ADAPTED)[0]),
        ValueError,
        "Freeze().apply at 'dense/bias': expected an array as 'w', got NoneType: this is one half of "
        "`rpx.partition`. Join both halves with `rpx.combine` first.",
    ),
    "a penalty of parameters": (
        lambda: rpx.Gaussian(1.0).penalty(PARAMS),
        ValueError,
        "Gaussian(std=1.0).penalty got a tree that never went through init: it holds no '@gaussian'. Call "
        "`raw = p.init(params)` once, with the whole chain, and pass `raw`.",
    ),
    "a change of a stage": (
        lambda: setattr(rpx.VarNoise(0.1), "std", 0.2),
        AttributeError,
        "VarNoise(0.1) cannot be changed: 'std' is set when it is built. Build a new one.",
    ),
}

# Functions of the package.
FUNCTIONS = {
    "partition of a chain": (
        lambda: rpx.partition(P),
        TypeError,
        "partition takes a raw tree, but got WeightNorm() >> VarNoise(0.1). Write `rpx.partition(p.init(params))`.",
    ),
    "partition with a filter": (
        lambda: rpx.partition(RAW, callable),
        TypeError,
        "partition got 2 arguments by position, but takes 1. Write `rpx.partition(raw)`.",
    ),
    "combine of a pair": (
        lambda: rpx.combine(rpx.partition(ADAPTED)),
        TypeError,
        "combine needs 'fixed'. Write `rpx.combine(free, fixed)`.",
    ),
    "combine of other halves": (
        lambda: rpx.combine(rpx.partition(ADAPTED)[0], rpx.partition(RAW)[1]),
        ValueError,
        "combine takes the two halves of one raw tree, but got trees of different structures, which differ "
        "at 'dense/bias', 'dense/bias/@freeze/@fixed/w', 'dense/kernel/@lora/@fixed/w/@freeze/@fixed/w' "
        "and more. If `free` was saved alone, make its other half with `rpx.partition(p.init(params))[1]`.",
    ),
    "combine of whole trees": (
        lambda: rpx.combine(RAW, RAW),
        ValueError,
        "combine takes the two halves of one raw tree, but both of them hold a value at 'dense/bias'. Pass "
        "`free, fixed = rpx.partition(raw)`, or updated versions of both.",
    ),
    "labels of a chain": (
        lambda: rpx.labels(P),
        TypeError,
        "labels takes a raw tree, but got WeightNorm() >> VarNoise(0.1). Write `rpx.labels(p.init(params))`.",
    ),
    "labels first": (
        lambda: rpx.labels("free", RAW),
        TypeError,
        "labels takes a raw tree, but got 'free'. Write `rpx.labels(p.init(params))`.",
    ),
    "decay_mask with a chain": (
        lambda: rpx.decay_mask(P, RAW),
        TypeError,
        "decay_mask got 2 arguments by position, but takes 1. Write `rpx.decay_mask(raw)`.",
    ),
    "transfer of a raw tree first": (
        lambda: rpx.transfer(RAW, P, NORM),
        TypeError,
        "transfer takes parametrizations first, but got dict. Write `rpx.transfer(old, new, raw)`.",
    ),
    "transfer of classes": (
        lambda: rpx.transfer(rpx.WeightNorm, rpx.SpectralNorm, RAW),
        TypeError,
        "transfer takes parametrizations first, but got the class WeightNorm, not a stage such as "
        "WeightNorm(). Write `rpx.transfer(old, new, raw)`.",
    ),
    "transfer without a raw tree": (
        lambda: rpx.transfer(P, NORM),
        TypeError,
        "transfer needs 'raw'. Write `rpx.transfer(old, new, raw, like=None, nearest=False)`.",
    ),
    "summary of a raw tree": (
        lambda: rpx.summary(P, RAW),
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).init takes the model's own parameters, but got a raw tree: it "
        "holds '@weight_norm' at 'dense/kernel'. Call `init` once, with the whole chain, and pass its "
        "result to `apply`.",
    ),
    "summary without parameters": (
        lambda: rpx.summary(P),
        TypeError,
        "summary needs 'params'. Write `rpx.summary(p, params)`.",
    ),
    "summary with the parameters first": (
        lambda: rpx.summary(PARAMS, P),
        TypeError,
        "summary takes parametrizations first, but got dict. Write `rpx.summary(p, params)`.",
    ),
    "projected with an optimizer first": (
        lambda: rpx.training.projected(optax.adam(1e-3), P),
        TypeError,
        "projected got 2 arguments by position, but takes 1. Write `rpx.training.projected(p)`.",
    ),
    "projected of an optimizer": (
        lambda: rpx.training.projected(optax.adam(1e-3)),
        TypeError,
        "projected takes parametrizations first, but got GradientTransformationExtraArgs. Write "
        "`rpx.training.projected(p)`.",
    ),
    "projected of a class": (
        lambda: rpx.training.projected(rpx.norms.MaxNorm),
        TypeError,
        "projected takes parametrizations first, but got the class MaxNorm, not a stage such as MaxNorm(). "
        "Write `rpx.training.projected(p)`.",
    ),
    "projected of a raw tree": (
        lambda: rpx.training.projected(rpx.norms.MaxNorm(1.0)).init(RAW),
        ValueError,
        "MaxNorm(1.0).projected takes the model's own parameters, but got a raw tree: it holds "
        "'@weight_norm' at 'dense/kernel'. To train a raw tree, use `rpx.optimizer` alone: the result of `apply` is "
        "already in the image.",
    ),
    "projected with updates of a raw tree": (
        lambda: rpx.training.projected(rpx.norms.MaxNorm(1.0)).update(RAW, (), PARAMS),
        ValueError,
        "MaxNorm(1.0).projected takes updates and parameters of one structure: expected an array at "
        "'dense/kernel', got '@weight_norm'. Call `tx.update(grads, state, params)`.",
    ),
    "laws of a class": (
        lambda: check_laws(rpx.WeightNorm, PARAMS),
        TypeError,
        "check_laws takes parametrizations first, but got the class WeightNorm, not a stage such "
        "as WeightNorm(). Write `rpx.testing.check_laws(p, params)`.",
    ),
    "laws with the parameters first": (
        lambda: check_laws(PARAMS, NORM),
        TypeError,
        "check_laws takes parametrizations first, but got dict. Write `rpx.testing.check_laws(p, params)`.",
    ),
    "reset_moments of one tree": (
        lambda: rpx.training.reset_moments(STATE, RAW),
        TypeError,
        "reset_moments needs 'after'. Write `rpx.training.reset_moments(state, before, after)`.",
    ),
    "remat of a chain": (
        lambda: rpx.remat(P),
        TypeError,
        "remat takes a function, but got WeightNorm() >> VarNoise(0.1) of type Chain. Pass one, such as the loss.",
    ),
    "factored of a chain": (
        lambda: rpx.factored(P),
        TypeError,
        "factored takes a function, but got WeightNorm() >> VarNoise(0.1) of type Chain. Pass one, such as the loss.",
    ),
    "local of a chain": (
        lambda: rpx.local(P),
        TypeError,
        "local takes a function, but got WeightNorm() >> VarNoise(0.1) of type Chain. Pass one, such as the loss.",
    ),
    "saved of a number": (
        lambda: rpx.saved(1.0),
        TypeError,
        "saved takes a function, but got 1.0 of type float. Pass one, such as the loss.",
    ),
    "explain of a chain": (
        lambda: rpx.explain(P),
        TypeError,
        "explain takes a function, but got WeightNorm() >> VarNoise(0.1) of type Chain. Pass one, such as the loss.",
    ),
}

TABLES = {
    "steps": STEPS,
    "chains": CHAINS,
    "names": NAMES,
    "selections": SELECTIONS,
    "calls": CALLS,
    "functions": FUNCTIONS,
}
MISTAKES = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_a_sentence(mistake):
    call, error, text = MISTAKES[mistake]
    with raises(error, text), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        call()


def test_an_error_of_the_transformation_itself_stays_as_it_is():
    tx = rpx.optimizer(optax.adamw(1e-3))
    text = "^You are using a transformation that requires the current value"
    with pytest.raises(ValueError, match=text), jax.numpy_dtype_promotion("standard"):
        step(tx, RAW, zeros(tx.init, RAW))


def test_a_call_that_fits_keeps_its_own_error():
    def broken(path, array):
        return path.key

    with pytest.raises(AttributeError, match=r"^'str' object has no attribute 'key'\n") as caught:
        rpx.WeightNorm(where=broken).init(PARAMS)
    assert "which got the path 'dense/bias' and the array" in caught.value.__notes__[0]


def test_a_predicate_may_return_a_match_or_a_known_scalar():
    for where in (lambda path, _: re.search("out", path), lambda path, _: np.bool_("out" in path)):
        raw = jax.eval_shape(rpx.WeightNorm(where=where).init, PARAMS)
        assert [holds_markers(raw[name]["kernel"]) for name in ("dense", "out")] == [False, True]


def test_the_words_of_others_lead_to_words_that_exist():
    stages = [x for x in PUBLIC.values() if isinstance(x, type) and issubclass(x, rpx.Parametrization)]
    taken = {field.name for stage in filter(dataclasses.is_dataclass, stages) for field in dataclasses.fields(stage)}
    assert {word for words in ARGUMENTS.values() for word in words} <= taken
    assert taken.isdisjoint(ARGUMENTS.keys() - {"alpha", "axis", "scale"})
    for name, text in OF_OTHERS.items():
        assert name not in PUBLIC
        assert set(re.findall(r"rpx\.[\w.]+", text)) <= set(how_to_write(vars(rpx)).values()), text
