"""What all tests share: ranks that start with everything imported, and hypothesis at a modest pace."""

import os

from hypothesis import settings

from lab import ranks

ranks.preload("tests.preloaded")
ranks.warm_up()  # meanwhile pytest collects

settings.register_profile(
    "workbook", deadline=None, max_examples=20, derandomize=bool(os.environ.get("CI")), print_blob=True
)
settings.load_profile("workbook")
