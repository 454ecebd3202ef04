"""The strict room in which all tests run: eight simulated devices, no silent promotion of dtypes or ranks.

Most of the time goes to compiling small programs, so the compiler is told not to try hard, and programs are kept in the
folder of the environment, for all workers and for later runs.
"""

import ctypes
import functools
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring
import jaxlib
import pytest
from jax._src.interpreters import mlir
from jax.extend.mlir import ir

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", val=True)
# Else JAX adds a note to errors on some Pythons, and doctests compare notes on some.
jax.config.update("jax_traceback_filtering", "off")

gc.disable()  # what the imports make stays, so garbage is looked for when they are done

PROGRAMS = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", Path(sys.prefix) / "jax_cache"))
MOST_PROGRAMS = 50_000  # about five times what one version of the tests compiles, and 0.5 GB
SIZE_OF_A_PROGRAM = 350_000
MEMORY_OF_PROGRAMS = 500_000_000  # beside half a GB of modules, so that a worker needs less than 1.5 GiB
ENOUGH_FOR_A_TEST = 10  # programs
MOST_OF_A_TEST = 100  # as it depends on the order how many operations without ``jit`` others have left
MOST_IN_IMPORTS = 30  # programs, as each worker imports all tests, and would compile theirs
EXAMPLES_OF_MANY_PROGRAMS = {"stages", "models", "transforms", "training", "testing"}
WARM = 300  # programs, from which on that depends little on the order; and tests that are picked out have none
YOUNG_OBJECTS = 100_000  # before garbage is looked for: tracing makes thousands of objects, and most of them stay
FASTER = (
    "--xla_cpu_use_fusion_emitters=false",  # halves the time of compiling; since jax 0.11.1 there is no such flag
    "--xla_cpu_parallel_codegen_split_count=1",  # as the other cores have workers of their own
)

if sys.prefix != sys.base_prefix:
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config: pytest.Config) -> None:
    """Flags and the folder of programs once for all workers, which have the environment of this process."""
    config.pluginmanager.register(COMPILED)
    if not hasattr(config, "workerinput"):
        all_known = xla_knows(" ".join(FASTER), config)  # one process to ask, not one for each
        known = [flag for flag in FASTER if all_known or xla_knows(flag, config)]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *known])
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the other cores have workers of their own
        empty_when_full(PROGRAMS)


def xla_knows(flag: str, config: pytest.Config) -> bool:
    """Whether XLA takes the flag. It stops the process otherwise, so another process tries; pytest keeps the answer."""
    if not hasattr(config, "cache"):
        return False
    question = f"xla/{jaxlib.__version__}/{flag}"
    answer = config.cache.get(question, None)
    if answer is None:
        tried = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
        answer = subprocess.run(tried, env={**os.environ, "XLA_FLAGS": flag}, capture_output=True).returncode == 0
        config.cache.set(question, answer)
    return answer


def empty_when_full(programs: Path) -> None:
    """Programs of older code are never read again. Whoever misses one that is deleted here compiles it."""
    kept = list(programs.glob("*"))
    if len(kept) > MOST_PROGRAMS:
        for program in kept:
            program.unlink(missing_ok=True)


def most_programs_in_memory(memory: int, workers: int) -> int:
    """As many as half of the memory takes, and no more than 1400. What is needed again is read from the folder."""
    return min(MEMORY_OF_PROGRAMS, memory // 2 // workers) // SIZE_OF_A_PROGRAM


def memory_of_machine() -> int:
    """In bytes; that of the container, where it says how much it may have."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.exists() else "max"
    return min(machine, int(said)) if said.isdecimal() else machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A quick test that asks for many programs, in the cache or not, fails: they cost more than all else it does."""
    before = COMPILED.number
    yield
    picked = item.config.getoption("keyword") or any("::" in each for each in item.config.args)
    of_peers = "peers" in item.path.parts  # which a part of its own runs
    if before >= WARM and not picked and not of_peers and item.get_closest_marker("thorough") is None:
        refuse_many(COMPILED.number - before)


def refuse_many(programs: int) -> None:
    if programs > MOST_OF_A_TEST:
        pytest.fail(
            f"This test compiled {programs} programs. A quick one takes {ENOUGH_FOR_A_TEST}, and {MOST_OF_A_TEST} at "
            "the most: pass arrays of numpy, put steps into one `jax.jit`, and many cases into one program, or mark it "
            "thorough.",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share programs, so they belong to one worker, where they say nothing else.

    Examples in docstrings of some folders are thorough, as those on pages: each of their operations is a program, and
    quick tests show what they show. So are all tests of the folders that ``make test`` leaves out.
    """
    for item in items:
        if item.nodeid.startswith(("tests/evidence/", "tests/examples/")):
            item.add_marker(pytest.mark.thorough)
        if isinstance(item, pytest.DoctestItem) and EXAMPLES_OF_MANY_PROGRAMS.intersection(item.nodeid.split("/")):
            item.add_marker(pytest.mark.thorough)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_collection_finish() -> None:
    """What the imports have made stays: no collection of garbage, and no search for leaks, need look at it again."""
    COMPILED.in_imports = COMPILED.number
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


class Compiled:
    """Counts the programs that stand in memory."""

    def __init__(self, most: int) -> None:
        self.most, self.number, self.in_imports = most, 0, 0

    def __call__(self, event: str, _: float, **kwargs: str | int) -> None:
        self.number += event.endswith("/backend_compile_duration")

    def pytest_runtest_logfinish(self) -> None:
        """Called for doctests too, as a hook of this file is not."""
        self.clear_when_many()

    def clear_when_many(self) -> None:
        if self.number > self.most:
            jax.clear_caches()
            shared_context.cache_clear()
            return_memory()
            self.number = 0


def return_memory() -> None:
    """Gives what is free in pieces back to the system, where the library of C can: new programs fill little of it."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


# JAX makes a context for the text of each program, since jax 0.12.0 of every eleventh. That takes longer than all else
# that it does before it compiles a small one, and a megabyte for as long as the program stands in memory.
new_context = mlir.make_ir_context
shared_context = functools.cache(new_context)


def context() -> ir.Context:
    """One for all programs, but for one that JAX compiles while it writes another."""
    return shared_context() if ir.Context.current is None else new_context()


mlir.make_ir_context = context
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
COMPILED = Compiled(most_programs_in_memory(memory_of_machine(), WORKERS))
jax.monitoring.register_event_duration_secs_listener(COMPILED)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
