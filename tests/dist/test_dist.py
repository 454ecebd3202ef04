"""What `make dist` has built: what stands in it, and that it works where nothing else is installed."""

import importlib.util
import os
import re
import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
BUILT = sorted((ROOT / "dist").glob("*"))
NAME = "reparax-" + re.search(r'__version__ = "(.*)"', (ROOT / "src/reparax/__init__.py").read_text())[1]
FACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    return zipfile.ZipFile(BUILT[0])


def tracked(*folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def test_there_are_a_wheel_and_an_sdist_of_this_version():
    assert [path.name for path in BUILT] == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]


def test_the_wheel_has_the_package_and_what_describes_it_alone(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in tracked("src")}
    assert "reparax/py.typed" in names
    assert f"{NAME}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_the_sdist_has_what_git_has_alone():
    with tarfile.open(BUILT[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names - {"PKG-INFO"} <= tracked()
    assert tracked("src", "tests", "docs", "LICENSE", "README.md", "CHANGELOG.md", "Makefile") <= names


def test_the_wheel_says_what_it_needs(wheel):
    said = Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())
    needs = [line for line in said.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needs == FACTS["dependencies"]
    assert said["Requires-Python"] == FACTS["requires-python"]
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text().split("\n\n")[1] in said.get_payload()


def test_links_of_the_readme_are_whole_where_the_project_has_an_address():
    hook = importlib.util.spec_from_file_location("index_page", ROOT / "docs" / "index_page.py")
    module = importlib.util.module_from_spec(hook)
    hook.loader.exec_module(module)
    text = "![A\npicture](docs/a.png) [page](docs/a.md#part) [notebooks](notebooks) [other](https://b.c) [here](#part)"
    shown = '<source media="x" srcset="docs/a.svg"><img src="docs/b.svg" alt="src"><img src="https://b.c/d.svg">'
    assert module.with_whole_links(shown, "https://a.b/c") == (
        '<source media="x" srcset="https://a.b/c/raw/HEAD/docs/a.svg">'
        '<img src="https://a.b/c/raw/HEAD/docs/b.svg" alt="src"><img src="https://b.c/d.svg">'
    )
    assert module.with_whole_links(text, "https://a.b/c") == (
        "![A\npicture](https://a.b/c/raw/HEAD/docs/a.png) [page](https://a.b/c/blob/HEAD/docs/a.md#part) "
        "[notebooks](https://a.b/c/blob/HEAD/notebooks) [other](https://b.c) [here](#part)"
    )


@pytest.mark.parametrize("version", PYTHONS)
def test_the_first_example_runs_where_the_wheel_optax_and_flax_alone_are_installed(version, tmp_path):
    found = subprocess.run(
        [ROOT / ".ci" / "python", version], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found:
        pytest.skip(f"there is no Python {version} here")
    home, python = tmp_path / "home", tmp_path / "home" / "bin" / "python"
    subprocess.run([found, "-m", "venv", home], check=True)
    subprocess.run([python, "-m", "pip", "-q", "install", "--no-compile", BUILT[0], "optax", "flax"], check=True)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    outside = {"cwd": tmp_path, "env": settings, "capture_output": True, "text": True}
    ran = subprocess.run([python, "-I", "-c", f"{example}\nprint(plain.layers[0].kernel.shape)"], **outside)
    assert (ran.stdout, ran.stderr) == ("(64, 512)\n", "")
    demo = subprocess.run([python, "-I", "-m", "reparax.demo"], **outside)
    assert re.fullmatch(r"The demo needs \w+\. Install it with: pip install 'reparax\[demo\]'\n", demo.stderr)
