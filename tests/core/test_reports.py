"""Lines of reports: equal ones are counted, and runs of numbers are joined."""

import jax
import jax.numpy as jnp
import pytest

from reparax.core.reports import count_lines, fold_lines, readable_size, size_in_bytes


def shown(lines):
    return [f"{line.times}{line.path}: {line.value}" for line in lines]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("a/0:x b:x a/1:x a/3:x", ["2 x a/0..1: x", "b: x", "a/3: x"]),
        ("a/0:x a/1:y a/2:x", ["a/0: x", "a/1: y", "a/2: x"]),
        ("a/2:x a/0:x a/1:x", ["3 x a/0..2: x"]),
        ("a/9:x a/10:x a/11:x", ["3 x a/9..11: x"]),
        ("a/0/b/0:x a/0/b/1:x a/1/b/0:x a/1/b/1:x", ["4 x a/0..1/b/0..1: x"]),
        ("a/0/b/0:x a/0/b/1:x a/1/b/0:x", ["2 x a/0..1/b/0: x", "a/0/b/1: x"]),
        ("a/0/c:x a/1/d:x", ["a/0/c: x", "a/1/d: x"]),
        ("a/0:x a/0:x a/1:x a/1:x", ["4 x a/0..1: x"]),
        ("a/0/w:x b/0/c/1:x a/1/w:x", ["2 x a/0..1/w: x", "b/0/c/1: x"]),
        ("a/0:x a/0:x a/1:x", ["2 x a/0: x", "a/1: x"]),
        ("", []),
    ],
)
def test_consecutive_numbers_with_equal_values_are_joined(items, expected):
    assert shown(fold_lines([tuple(item.split(":")) for item in items.split()])) == expected


def test_a_joined_line_keeps_its_paths():
    (line,) = fold_lines([("a/1", "x"), ("a/0", "x"), ("a/1", "x"), ("a/0", "x")])
    assert (line.count, line.members) == (4, ("a/0", "a/1"))


def test_counted_lines_keep_the_order_of_their_first():
    assert shown(count_lines([("b", 1), ("a", 1), ("b", 1), ("b", 2)])) == ["2 x b: 1", "a: 1", "b: 2"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (2**40, "1024.0 GiB"),
    ],
)
def test_sizes_have_units(size, text):
    assert readable_size(size) == text


@pytest.mark.parametrize(
    ("x", "size"),
    [
        (jax.ShapeDtypeStruct((3, 5), jnp.float32), 60),
        (jax.ShapeDtypeStruct((3,), jnp.bfloat16), 6),
        (jax.ShapeDtypeStruct((), jnp.int8), 1),
        (jax.eval_shape(lambda: jax.random.key(0)), 8),
        (jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2)), 32),
    ],
    ids=["float32", "bfloat16", "int8", "a key of two words", "keys of four words"],
)
def test_sizes_in_bytes(x, size):
    assert size_in_bytes(x) == size
