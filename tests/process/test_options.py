import pytest

from penstock.process.options import format_size, parse_size, shown_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("6GB", 6_000_000_000), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2kb", 2000)],
)
def test_sizes_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "6 apples", "1e9", "0x10", "9" * 40])
def test_error_names_a_text_that_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_size_prints_in_the_largest_unit_below_it() -> None:
    assert format_size(6_000_000_000) == "6.00 GB"
    assert format_size(512) == "512 B"


@pytest.mark.parametrize("text", ["0", "2MiB", "64MiB", "256MB", "1GiB", "1500", "7"])
def test_default_size_is_shown_as_it_is_typed(text: str) -> None:
    assert shown_size(parse_size(text)) == text
