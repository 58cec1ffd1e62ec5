"""Settings of the clients: checked whole, never shown, and mistyped names found."""

import pytest
from pydantic import ValidationError

from dualclaw_clients.settings import (
    ClientSettings,
    ImSettings,
    SettingsError,
    WebSettings,
    check_target,
    unknown_names,
    variables_of,
)


@pytest.mark.parametrize("target", ["127.0.0.1:50051", "engine:1", "[::1]:50051", "unix:/run/x.sock", "dns:///e:1"])
def test_addresses_of_engines_are_accepted(target):
    """HOST:PORT and the names gRPC resolves itself."""
    assert check_target(target) == target


@pytest.mark.parametrize("target", ["", "engine", "engine:", ":1", "engine:0", "engine:65536", "http://e:1", "::1:5"])
def test_what_is_no_address_is_refused(target):
    """A missing port, a port out of range and a URL are found before any connection is tried."""
    with pytest.raises(ValueError, match=r"HOST:PORT|port must be"):
        check_target(target)


def test_a_key_is_not_shown_by_its_settings():
    """Neither repr nor str nor a dump to JSON has it."""
    settings = ClientSettings(api_key="geheim")
    assert settings.api_key.get_secret_value() == "geheim"
    for text in (repr(settings), str(settings), settings.model_dump_json()):
        assert "geheim" not in text


def test_settings_cannot_be_changed_later():
    """What was checked stays what it was."""
    settings = ClientSettings()
    with pytest.raises(ValidationError):
        settings.engine = "other:1"


def test_a_listen_address_may_leave_the_port_to_the_system_and_origins_are_a_list():
    """Port 0 is for tests; commas part the origins and empty ones vanish."""
    settings = WebSettings(web_listen="127.0.0.1:0", web_origins="http://a, http://b,")
    assert settings.web_listen == "127.0.0.1:0"
    assert settings.web_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    "origin", ["xx", "*", "null", "chat.example", "https://", "https://a/path", "https://a:0", "https://a:65536", "a b"]
)
def test_what_is_no_origin_is_refused_by_its_place(origin):
    """An origin that no browser sends would be a silent no; the entry is named, and what it must be."""
    with pytest.raises(ValidationError, match="must be SCHEME://HOST"):
        WebSettings(web_origins=f"https://good.example,{origin}")


def test_origins_with_ports_and_brackets_are_accepted():
    """Whatever a browser may send as Origin."""
    given = "https://chat.example:8443,http://[::1]:8080,http://localhost/,chrome-extension://abc"
    assert WebSettings(web_origins=given).web_origins == tuple(given.split(","))


def test_a_client_without_its_own_key_has_none():
    """A gateway's client must not even hold the key it may not lend."""
    settings = ClientSettings(api_key="geheim")
    assert ("authorization", "Bearer geheim") in settings.connect()._call_metadata(None)
    assert settings.connect(own_key=False)._call_metadata(None) == ()


def test_a_certificate_without_its_key_is_refused(tmp_path):
    """Mutual TLS needs both files, and files that are there."""
    path = tmp_path / "cert.pem"
    path.write_text("x")
    with pytest.raises(ValidationError, match="go together"):
        ClientSettings(engine_cert_file=path)
    with pytest.raises(ValidationError, match="file"):
        ClientSettings(engine_ca_file=tmp_path / "missing.pem")


def test_a_file_that_goes_away_before_it_is_read_is_a_settings_error(tmp_path):
    """Between check and use there is time; then too the text names the file."""
    path = tmp_path / "ca.pem"
    path.write_text("x")
    settings = ClientSettings(engine_ca_file=path)
    path.unlink()
    with pytest.raises(SettingsError, match=r"ca\.pem cannot be read"):
        settings.connect()


def test_names_nobody_reads_are_warned_of_and_those_of_the_engine_are_not():
    """A typing error is named with what was probably meant."""
    names = [
        "DUALCLAW_ENGINE",
        "DUALCLAW_WEB_LISTEM",
        "DUALCLAW_STORE",
        "DUALCLAW_GRACE",
        "DUALCLAW_MAX_SEND_BYTES",
        "DUALCLAW_TLS_CERT",
        "DUALCLAW_MODEL_API_KEY",
        "DUALCLAW_ZZZ",
        "PATH",
    ]
    assert unknown_names(names) == [
        "DUALCLAW_WEB_LISTEM is no setting of dualclaw; did you mean DUALCLAW_WEB_LISTEN?",
        "DUALCLAW_ZZZ is no setting of dualclaw",
    ]


def test_the_names_of_the_variables_are_the_documented_ones():
    """They are public: a renamed field would break every deployment."""
    assert {"DUALCLAW_ENGINE", "DUALCLAW_API_KEY"} <= set(variables_of(ClientSettings))
    assert "DUALCLAW_WEB_LISTEN" in variables_of(WebSettings)
    assert {"IM_USE_ENGINE_CORE", "IM_LEGACY_URL"} <= set(variables_of(ImSettings))
