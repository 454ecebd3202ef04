"""What the tests rely on to be quick on any machine: kept programs are bounded, and XLA is asked before it is told."""

import conftest
import pytest


def test_a_test_of_many_programs_fails_and_says_what_to_do():
    conftest.refuse_many(conftest.MOST_OF_A_TEST)
    with pytest.raises(pytest.fail.Exception, match=r"^This test compiled 101 programs\."):
        conftest.refuse_many(conftest.MOST_OF_A_TEST + 1)


def test_to_import_the_tests_compiles_few_programs(request):
    if any("peers" in item.path.parts for item in request.session.items):
        pytest.skip("Those of peers have workers of their own.")
    assert conftest.COMPILED.in_imports <= conftest.MOST_IN_IMPORTS, "take arrays of numpy for constants of modules"
