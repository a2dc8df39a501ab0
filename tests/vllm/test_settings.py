"""The variable is strict: a variant that is not understood is refused, never half applied."""

import pytest

from exl3_vllm.settings import ServedVariant, parse_variant


def test_an_empty_variable_is_the_default():
    assert parse_variant("") == ServedVariant(linear="auto", embedding="stored", tally=False)


def test_every_key_is_read():
    text = '{"linear": "1-16:reference,17-:fp16-staged", "embedding": "int8", "tally": true}'
    variant = parse_variant(text)
    assert variant.as_json() == {
        "linear": "1-16:reference,17-:fp16-staged",
        "embedding": "int8",
        "tally": True,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"embeding": "int8"}', "unknown key `embeding`"),
        ('{"embedding": "int4"}', "expected one of"),
        ('{"embedding": "int8", "embedding": "stored"}', "twice"),
        ('{"linear": "1-8:reference"}', "not served"),
        ('{"linear": "1-:no-such-route"}', "unknown route"),
        ('{"linear": 4}', "expected a string"),
        ('{"tally": 1}', "expected true or false"),
    ],
)
def test_what_is_not_understood_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_variant(text)
