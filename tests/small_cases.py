"""Many small cases in one test: pytest takes longer to collect, start and report a test than such a case takes."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Any: the arguments of a test.
Test = Callable[..., None]


def small_cases(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize(names, cases)`, but one test tries all cases, and a failure names those that fail.

    The cases share what fixtures give, so a test must leave folders and patches as it found them.
    """
    words = names.replace(",", " ").split()
    given = [dict(zip(words, case if len(words) > 1 else (case,), strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def all_cases(*positional: Any, **arguments: Any) -> None:
            failures: list[BaseException] = []
            for case in given:
                try:
                    test(*positional, **arguments, **case)
                # Whatever the test raises; `pytest.raises` and `pytest.fail` fail with an error of pytest's own.
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
                    error.add_note(f"case: {', '.join(f'{word}={value!r}' for word, value in case.items())}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(given)} cases fail", failures)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in words]
        vars(all_cases)["__signature__"] = signature.replace(parameters=kept)
        return all_cases

    return decorate
