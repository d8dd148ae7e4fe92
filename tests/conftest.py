"""Where a test runs. Markers (pyproject.toml): `gpu` needs a CUDA device, `interpret` needs TRITON_INTERPRET=1.

`make test` runs pytest twice: everything, then `-m interpret` under TRITON_INTERPRET=1, as the variable changes what @triton.jit
makes and so cannot be switched within a process.
"""

import pytest
import torch

from kernel_runtime import interpreting

pytest_plugins = ["tests.direct_tools"]  # fixtures of two test files
# an assertion that fails in what tests share says what it compared, as one in a test does
pytest.register_assert_rewrite("tests.kl_util", "tests.recompute_util", "tests.op_checks", "tests.trainer_util", "tests.mhc_reference")


def pytest_configure() -> None:
    if interpreting():
        from tests.quick_interpreter import install

        install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; run `python -m pytest -m gpu` where there is one"))
        if item.get_closest_marker("interpret") and not interpreting():
            item.add_marker(pytest.mark.skip(reason="Triton interpreter; `make test` runs it in a second pass with TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """The device of a kernel test: the CPU in Triton's interpreter, or a GPU."""
    return request.param
