"""The table of everything that may be wrong with data on a disk: small datasets with one fault, and the expected
result.

Where one sample is faulty, it is number FAULTY of four in one shard. Sequences are SEQ_LENGTH tokens.
"""

from __future__ import annotations

from tests.helpers.bad_data_files import DATASETS, FILES
from tests.helpers.bad_data_makers import FAULTY, SEQ_LENGTH, BadData
from tests.helpers.bad_data_samples import FORMS, JSONS, PICTURES

__all__ = ["BAD_DATA", "FAULTY", "SEQ_LENGTH", "BadData"]

BAD_DATA: list[BadData] = [*PICTURES, *JSONS, *FORMS, *FILES, *DATASETS]
