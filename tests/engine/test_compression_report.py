"""What people read of compression, whatever its size."""

import pytest

from hvdkit.engine.telemetry.compression_report import CodecStatistics, CompressionStatistics


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (100, 1, "100 bytes sent as 1 byte (100.0 x less)"),
        (1000, 999, "1.0 kB sent as 999 bytes (1.0 x less)"),
        (12_800, 3_260, "12.8 kB sent as 3.3 kB (3.9 x less)"),
        (999_950, 999_949, "1.0 MB sent as 999.9 kB (1.0 x less)"),
        (4_000_000_000, 8_000_000_000, "4000.0 MB sent as 8000.0 MB (2.0 x more)"),
    ],
)
def test_bytes_have_a_unit_in_which_they_are_no_zero(before, after, words):
    assert str(CodecStatistics("fp16", before, after, 0.0, 0.0, 0.0)) == f"fp16: {words}"


def test_a_codec_that_keeps_something_tells_its_seconds_and_its_residual():
    told = CodecStatistics("topk(0.01)", 2_000_000, 40_000, 0.014, 0.25, 12.3456)
    line = "topk(0.01): 2.0 MB sent as 40.0 kB (50.0 x less), encode 0.01 s, decode 0.25 s, residual 12.3"
    assert str(CompressionStatistics({"topk(0.01)": told}, {})) == line
