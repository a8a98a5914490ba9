"""The models of an audit, trained once for the tests of a module."""

import pytest
from support.memorised_books import Audited, make_audited


@pytest.fixture(scope="session")
def audited() -> Audited:
    return make_audited()
