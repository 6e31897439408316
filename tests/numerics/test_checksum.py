import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskrr.numerics import checksum
from daskrr.numerics.checksum import crc32c


@pytest.fixture(params=["library", "none"])
def library(request, monkeypatch):
    """With the function of the library, which lets others run, and where there is none."""
    if request.param == "none":
        monkeypatch.setattr(checksum, "_library", lambda: None)
    else:
        assert checksum._library() is not None


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_crc32c__goes_on_from_what_came_before(first, second):
    assert crc32c(second, crc32c(first)) == google_crc32c.value(first + second)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "values", [np.arange(7.0), np.ones((3, 5), np.float32), np.empty(0), np.arange(9, dtype=">i2")]
)
def test_crc32c__is_that_of_the_bytes_of_an_array(values):
    assert crc32c(values) == google_crc32c.value(values.tobytes())
    assert crc32c(values[:1]) == google_crc32c.value(values[:1].tobytes())


@pytest.mark.usefixtures("library")
def test_crc32c__refuses_memory_with_gaps():
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(np.arange(10.0)[::2])
