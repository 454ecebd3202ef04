"""What the tests rely on to be quick on any machine: kept programs are bounded, and XLA is asked before it is told."""

from types import SimpleNamespace

import conftest
import jax
import jax.numpy as jnp
import pytest


class Kept(dict):
    """The part of pytest's cache that answers are kept in."""

    set = dict.__setitem__


@pytest.mark.parametrize(("most", "left"), [(3, 3), (2, 0)])
def test_kept_programs_are_deleted_when_they_are_too_many(tmp_path, monkeypatch, most, left):
    monkeypatch.setattr(conftest, "MOST_PROGRAMS", most)
    for name in "abc":
        (tmp_path / name).touch()
    conftest.empty_when_full(tmp_path)
    assert len(list(tmp_path.iterdir())) == left


def test_programs_in_memory_are_counted_and_cleared_when_they_are_too_many():
    compiled = conftest.Compiled(1)
    jax.monitoring.register_event_duration_secs_listener(compiled)
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return x + 1

    f(jnp.ones(2))
    before = compiled.number
    assert before > 0
    f(jnp.ones(3))
    assert compiled.number > before
    compiled.clear_when_many()
    assert compiled.number == 0
    f(jnp.ones(3))
    assert len(traces) == 3


def test_a_test_of_many_programs_fails_and_says_what_to_do():
    conftest.refuse_many(conftest.MOST_OF_A_TEST)
    with pytest.raises(pytest.fail.Exception, match=r"^This test compiled 101 programs\."):
        conftest.refuse_many(conftest.MOST_OF_A_TEST + 1)


def test_to_import_the_tests_compiles_few_programs(request):
    if any("peers" in item.path.parts for item in request.session.items):
        pytest.skip("Those of peers have workers of their own.")
    assert conftest.COMPILED.in_imports <= conftest.MOST_IN_IMPORTS, "take arrays of numpy for constants of modules"


def test_programs_share_a_context_but_one_that_is_compiled_within_another(monkeypatch):
    def text():
        return jax.jit(lambda x: x + 1).lower(1.0).compiler_ir()

    assert text().context is text().context is conftest.shared_context()
    monkeypatch.setattr(conftest, "new_context", lambda: "another")
    with conftest.shared_context():
        assert conftest.context() == "another"


def test_programs_are_counted_and_cleared_in_doctests_too(pytestconfig):
    assert pytestconfig.pluginmanager.is_registered(conftest.COMPILED)


@pytest.mark.parametrize(("gigabytes", "workers", "most"), [(24, 2, 1428), (1, 2, 714), (60, 100, 857)])
def test_programs_take_half_of_the_memory_and_less_than_a_gigabyte_in_a_worker(gigabytes, workers, most):
    assert conftest.most_programs_in_memory(gigabytes * 10**9, workers) == most


def test_xla_is_asked_for_a_flag_once_and_not_at_all_where_pytest_keeps_no_answers(monkeypatch):
    kept, flag = Kept(), "--xla_there_is_no_such_flag=1"
    assert not conftest.xla_knows(flag, SimpleNamespace(cache=kept))
    assert list(kept.values()) == [False]
    monkeypatch.setattr(conftest.subprocess, "run", pytest.fail)
    assert not conftest.xla_knows(flag, SimpleNamespace(cache=kept))
    assert not conftest.xla_knows(flag, SimpleNamespace())
