"""What the IM claw needs to start as a service: all problems at once, secrets never shown."""

import pytest

from dualclaw_clients.im.__main__ import main
from dualclaw_clients.im.settings import RelaySettings
from dualclaw_clients.settings import SettingsError, load_settings

SECRET = "a secret long enough"
WHOLE = {
    "im_connectors": "console, webhook",
    "im_state": "im.db",
    "im_webhook_secrets": f"{SECRET},another secret here",
    "im_webhook_reply_url": "https://bot.example/replies",
    "im_webhook_approvers": "boss, chief",
}


def problems(**changes):
    """What a start with these settings would be refused for."""
    settings = load_settings(RelaySettings, {**WHOLE, **changes})
    with pytest.raises(SettingsError) as caught:
        settings.check_service()
    return str(caught.value)


def test_whole_settings_are_taken():
    """Lists have commas; the first secret signs."""
    settings = load_settings(RelaySettings, WHOLE)
    settings.check_service()
    assert settings.im_connectors == ("console", "webhook")
    assert settings.webhook_secrets() == (SECRET, "another secret here")
    assert settings.im_webhook_approvers == ("boss", "chief")
    assert SECRET not in repr(settings)


def test_everything_that_is_missing_is_said_at_once():
    """Each under the name of its variable."""
    told = problems(im_state="", im_webhook_secrets="short", im_webhook_reply_url="")
    for name in ("DUALCLAW_IM_STATE", "DUALCLAW_IM_WEBHOOK_SECRETS", "DUALCLAW_IM_WEBHOOK_REPLY_URL"):
        assert name in told
    assert "short" not in told.replace("shorter", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("im_connectors", "telex"),
        ("im_connectors", "console,console"),
        ("im_language", "fr"),
        ("im_after_send", "maybe"),
        ("im_webhook_name", "a/b"),
        ("im_webhook_tenant", "租户"),
        ("im_webhook_limit", "1"),
        ("im_webhook_listen", "nonsense"),
    ],
)
def test_a_wrong_value_is_named(name, value):
    """With its variable, before anything starts."""
    with pytest.raises(SettingsError, match=f"DUALCLAW_{name.upper()}"):
        load_settings(RelaySettings, {**WHOLE, name: value})


def test_without_a_connector_the_program_says_how_to_name_one(capsys):
    """Both ways are told."""
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "dualclaw-im console" in told
    assert "DUALCLAW_IM_CONNECTORS" in told
