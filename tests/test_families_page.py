"""docs/reference/families.md is what the tests of families say."""

from __future__ import annotations

import families_page


def test_the_page_has_the_table_that_the_tests_make() -> None:
    written = families_page.PAGE.read_text()
    assert written == families_page.page(), "run: python tests/support/families_page.py --write"
