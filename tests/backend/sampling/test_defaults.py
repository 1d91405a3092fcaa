"""--default-sampling: a JSON object of sampling settings."""

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.sampling.defaults import read_default_sampling


def test_settings_that_are_null_stay_the_models() -> None:
    settings = '{"temperature": 0.3, "top_k": null, "presence_penalty": 1}'
    assert read_default_sampling(settings) == {"temperature": 0.3, "presence_penalty": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": -1}', r">= 0.0 - at `\$.temperature`"),
        ('{"temp": 1}', "unknown field `temp`; write a JSON object with some of temperature, top_p"),
        ('{"seed": 1}', "unknown field `seed`"),
        ("temperature=1", "malformed"),
        ("{" + " " * 600, "601 characters; at most 512"),
    ],
)
def test_settings_that_no_request_may_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_default_sampling(text)
