"""What credentials look like: a table of rules, each with an id, and what makes sure that text stays text.

Rules of the rules

- Linear time by construction. A run of characters is possessive and either ends the pattern or is bounded, so
  a failed attempt costs a constant and a successful one is never looked at again. Where a run needs something
  after it (a JWT its dots), that is optional in the pattern and ``check`` decides, so the run is consumed.
- What a vendor marks (``ghp_``, ``AKIA``, ``sk-ant-``) is found anywhere, also glued to other letters. Shapes
  that ordinary words can end in (``task-`` before a hash) need a border on their left.
- ``hints`` are lower-case texts of which one must be there, or the pattern is not tried: most texts cost
  nothing but a few substring searches.
- The group "secret" is what is masked, the whole match when there is none.
- Hashes, UUIDs, ids and encoded images are no credentials: nothing here goes by randomness alone. A bare AWS
  secret or a key of 32 hex digits is therefore only known by the name it stands under.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualclaw_server.interceptors.secret_names import NAMED, is_secret_pair


@dataclass(frozen=True, slots=True)
class Rule:
    """One form of credential."""

    id: str
    """Shown in place of what it finds."""
    pattern: re.Pattern[str]
    hints: tuple[str, ...] = ()
    """Lower-case texts; without one of them in the text it is not searched. None given: always searched."""
    check: Callable[[re.Match[str]], bool] | None = None
    """Says whether a match really is one."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]{1,40}", self.id):
            raise ValueError(f"rule id {self.id!r}: use 1 to 40 of a-z, 0-9 and -")
        if any(hint != hint.lower() for hint in self.hints):
            raise ValueError(f"rule {self.id}: hints are lower-case")


def _dense(match: re.Match[str]) -> bool:
    """Tell a token from a word: a digit, or letters of both cases that are no capitalised word."""
    text = match["secret"]
    return any(c.isdigit() for c in text) or not (text[1:].islower() or text.isupper())


def _upper_and_digit(match: re.Match[str]) -> bool:
    text = match[0]
    return any(c.isupper() for c in text) and any(c.isdigit() for c in text)


def _is_basic(match: re.Match[str]) -> bool:
    """Tell encoded ``user:password`` from a word; what is glued to its end does not matter."""
    text = match["secret"].rstrip("=")
    decoded = base64.b64decode(text[: len(text) // 4 * 4] or "AA==")
    return b":" in decoded and decoded[:8].isascii() and decoded[:8].decode().isprintable()


def _is_password(match: re.Match[str]) -> bool:
    """Say no to placeholders such as ``{password}``, ``$PASSWORD``, ``***`` and to what is masked already."""
    return not re.match(r"[{<$%*]|\[masked:", match["secret"])


def _is_card(match: re.Match[str]) -> bool:
    """Check the length and the Luhn sum."""
    digits = [int(c) for c in match[0] if c.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [d * 2 - 9 * (d > 4) for d in digits[-2::-2]]
    return (sum(doubled) + sum(digits[-1::-2])) % 10 == 0


def _rule(id_: str, pattern: str, *hints: str, check: Callable[[re.Match[str]], bool] | None = None) -> Rule:
    return Rule(id_, re.compile(pattern), hints, check)


_A = r"[A-Za-z0-9]"
_W = r"[A-Za-z0-9_-]"
_LEFT = r"(?<![A-Za-z0-9])"

RULES: Sequence[Rule] = (
    # Everything that stands under a telling name: password=..., "api_key": "...", <secret>...</secret>
    *(Rule(kind, pattern, hints, is_secret_pair) for kind, pattern, hints in NAMED),
    # Keys and tokens in general forms
    _rule(
        "private-key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        # to its end; a cut one as far as lines look like it
        r"(?:(?:[^-]|-(?!----))*+-----END [A-Z0-9 ]{0,40}-----|(?:(?:\s|\\[nrt])++[A-Za-z0-9+/=]{8,}+)*+)",
        "private key",
    ),
    _rule("private-key", r"Private-Lines:\s{0,9}\d{1,4}(?:\s++[A-Za-z0-9+/=]{16,}+)++", "private-lines"),
    _rule("jwt", rf"ey[A-Z]{_W}{{10,}}+(?P<rest>(?:\.{_W}*+){{2,4}})?", "ey", check=lambda m: m["rest"] is not None),
    _rule(
        "bearer-token",
        r"(?i:bearer)(?:\s|%20){1,4}(?P<secret>[A-Za-z0-9._~+/=-]{12,}+)",
        "bearer",
        check=_dense,
    ),
    _rule("basic-auth", r"(?i:basic)\s{1,4}(?P<secret>[A-Za-z0-9+/]{4,}+={0,2})", "basic", check=_is_basic),
    _rule(
        "authorization",
        r"(?i:authorization)[\"']?[ \t]{0,4}[:=][ \t]{0,4}[\"']?(?:[A-Za-z][A-Za-z0-9-]{1,30}[ \t]{1,3})?"
        r"(?P<secret>[^\s\"'<>,;]{8,}+)",
        "authorization",
        check=lambda match: _dense(match) and _is_password(match),
    ),
    _rule(
        "cookie",
        r"(?i:(?:set-)?cookie2?)[\"']?\s{0,4}[:=]\s{0,4}[\"']?"
        r"(?P<secret>[A-Za-z0-9_.-]{1,64}=(?!\[masked:)[^\r\n\"']{4,4096}+)",
        "cookie",
    ),
    _rule(
        "session-cookie",
        r"(?:PHPSESSID|JSESSIONID|ASP\.NET_SessionId|connect\.sid|sessionid)=(?P<secret>[^\s;,\"'\[]{6,}+)",
        "sess", "connect.sid",
    ),
    _rule(
        "url-password",
        r"://[^\s/:@\"'<>]{0,100}:(?P<secret>[^\s/\"'<>]{1,200})@",
        "://",
        check=_is_password,
    ),
    # a password with a slash in it, as people write them although they should not
    _rule(
        "url-password",
        r"://[^\s/:@\"'<>]{1,100}:(?!\d{1,5}[/?#])(?P<secret>[^\s\"'<>]{1,200})@(?=[\w.-]{1,253}:\d)",
        "://",
        check=_is_password,
    ),
    _rule("url-token", r"://(?P<secret>[A-Za-z0-9_-]{20,200})@", "://", check=_upper_and_digit),
    _rule(
        "signed-url",
        r"(?:X-Amz-Security-Token|[Ss]ignature|sig)=(?P<secret>[A-Za-z0-9%+/=_-]{24,}+)",
        "sig", "token",
    ),
    _rule("netrc", r"login\s{1,9}\S{1,100}\s{1,9}password\s{1,9}(?P<secret>[^\s\[]\S{0,200})", "login"),
    _rule(
        "curl-user",
        r"\s(?:-u|--user)[ =][\"']?[^\s:\"']{1,64}:(?P<secret>[^\s\"']{1,200}+)",
        "curl", "wget",
        check=lambda m: _is_password(m) and not m["secret"].isdigit(),
    ),
    _rule(
        "password-hash",
        r"\$(?:2[abxy]\$\d\d|argon2id?\$v=\d+\$[^\s$]{1,60}|[156y]\$(?:rounds=\d+\$)?[./A-Za-z0-9]{1,64})\$?[./A-Za-z0-9+$]{22,}+",
        "$",
    ),
    # Clouds
    _rule("aws-key-id", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16,}+", "akia", "asia", "abia", "acca"),
    _rule("aws-bedrock-key", r"ABSK[A-Za-z0-9+/]{80,}+=*+", "absk"),
    _rule("gcp-api-key", rf"AIza{_W}{{35,}}+", "aiza"),
    _rule("gcp-oauth", rf"ya29\.{_W}{{20,}}+|GOCSPX-{_W}{{20,}}+|1//0{_W}{{30,}}+", "ya29.", "gocspx-", "1//0"),
    _rule("azure-client-secret", r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,}+", "q~"),
    _rule("azure-key", r"(?:AccountKey|SharedAccessKey|AccessKey)=(?P<secret>[A-Za-z0-9+/%]{40,}+=*+)", "key="),
    _rule("azure-devops-token", rf"{_A}{{70,80}}AZDO{_A}{{4,}}+", "azdo"),
    _rule("aliyun-key-id", rf"LTAI{_A}{{16,}}+", "ltai"),
    _rule("tencent-key-id", rf"AKID{_A}{{28,}}+", "akid"),
    _rule("volcengine-key-id", rf"AKLT{_W}{{36,}}+", "aklt"),
    _rule("digitalocean-token", r"do[opr]_v1_[a-f0-9]{60,}+", "_v1_"),
    _rule("cloudflare-ca-key", r"v1\.0-[a-f0-9]{24}-[a-f0-9]{100,}+", "v1.0-"),
    _rule("databricks-token", r"dapi[a-f0-9]{32,}+", "dapi"),
    _rule("heroku-key", rf"HRKU-{_W}{{36,}}+", "hrku-"),
    _rule("fly-token", r"fm[12][ar]?_[A-Za-z0-9+/=_-]{80,}+|fo1_[A-Za-z0-9_-]{40,}+", "fm1", "fm2", "fo1_"),
    # Models
    _rule("anthropic-key", rf"sk-ant-{_W}{{20,}}+", "sk-ant-"),
    _rule("openai-key", rf"sk-(?:proj|svcacct|admin|None)-{_W}{{36,}}+", "sk-", check=_upper_and_digit),
    _rule("openai-key", rf"sk-{_A}{{20}}T3BlbkFJ{_A}{{20,}}+", "t3blbkfj"),
    _rule("openrouter-key", r"sk-or-v1-[a-f0-9]{40,}+", "sk-or-v1-"),
    _rule("langfuse-key", r"sk-lf-[a-f0-9]{8}-[a-f0-9-]{27,}+", "sk-lf-"),
    _rule("model-key", rf"{_LEFT}sk-{_A}{{30,}}+", "sk-"),  # DeepSeek, Qwen, Kimi and others who follow the form
    _rule("zhipu-key", rf"(?<=[a-f0-9]{{32}})\.(?P<secret>(?=[A-Za-z]*+\d){_A}{{16,}}+)", "."),
    _rule("huggingface-token", rf"hf_{_A}{{30,}}+|api_org_{_A}{{30,}}+", "hf_", "api_org_"),
    _rule("groq-key", rf"gsk_{_A}{{40,}}+", "gsk_"),
    _rule("xai-key", rf"xai-{_A}{{60,}}+", "xai-"),
    _rule("perplexity-key", rf"pplx-{_A}{{40,}}+", "pplx-"),
    _rule("replicate-token", rf"{_LEFT}r8_{_A}{{36,}}+", "r8_"),
    _rule("fireworks-key", rf"{_LEFT}fw_{_A}{{22,}}+", "fw_"),
    _rule("nvidia-key", rf"nvapi-{_W}{{50,}}+", "nvapi-"),
    _rule("elevenlabs-key", rf"{_LEFT}sk_[a-f0-9]{{40,}}+", "sk_"),
    _rule("tavily-key", rf"tvly-{_W}{{20,}}+", "tvly-"),
    _rule("langsmith-key", r"lsv2_(?:pt|sk)_[a-f0-9]{32}_[a-f0-9]{10,}+", "lsv2_"),
    # Code and builds
    _rule(
        "github-token",
        rf"gh[opsur]_{_A}{{36,}}+|github_pat_[A-Za-z0-9_]{{50,}}+",
        "gho_", "ghp_", "ghs_", "ghu_", "ghr_", "github_pat_",
    ),
    _rule("gitlab-token", r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|oas|ffct)-[A-Za-z0-9_.-]{20,}+", "gl"),
    _rule("atlassian-token", r"AT[AC]TT3[A-Za-z0-9_=+/-]{60,}+", "attt3", "cttt3", "att3", "ctt3"),
    _rule("npm-token", rf"npm_{_A}{{36,}}+", "npm_"),
    _rule("pypi-token", rf"pypi-AgE{_W}{{50,}}+", "pypi-age"),
    _rule("rubygems-key", r"rubygems_[a-f0-9]{40,}+", "rubygems_"),
    _rule("docker-token", rf"dckr_(?:pat|oat)_{_W}{{20,}}+", "dckr_"),
    _rule("artifactory-key", rf"AKCp{_A}{{60,}}+", "akcp"),
    _rule("vault-token", rf"hv[sbr]\.{_W}{{24,}}+", "hvs.", "hvb.", "hvr."),
    _rule("terraform-token", rf"{_A}{{14}}\.atlasv1\.[A-Za-z0-9_=-]{{60,}}+", ".atlasv1."),
    _rule("doppler-token", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._]{40,}+", "dp."),
    _rule("postman-key", r"PMAK-[a-f0-9]{24}-[a-f0-9]{30,}+", "pmak-"),
    _rule("age-key", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}+", "age-secret-key-"),
    _rule("sentry-token", r"sntry[su]_[A-Za-z0-9+/=_-]{40,}+", "sntry"),
    _rule("grafana-token", rf"glsa_{_A}{{32}}_[a-fA-F0-9]{{8,}}+|glc_[A-Za-z0-9+/]{{32,}}+=*+", "glsa_", "glc_"),
    _rule("newrelic-key", r"NRAK-[A-Z0-9]{27,}+", "nrak-"),
    _rule("planetscale-token", r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.-]{32,}+", "pscale_"),
    _rule("supabase-key", r"sbp_[a-f0-9]{40,}+|sb_secret_[A-Za-z0-9_-]{20,}+", "sbp_", "sb_secret_"),
    # Money, messages, offices
    _rule(
        "stripe-key",
        rf"[sr]k_(?:live|test)_{_A}{{16,}}+|whsec_[A-Za-z0-9+/=]{{24,}}+",
        "k_live_", "k_test_", "whsec_",
    ),
    _rule("square-token", rf"sq0(?:atp|csp|idp)-{_W}{{22,}}+", "sq0"),
    _rule("shopify-token", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32,}+", "shp"),
    _rule("slack-token", r"xox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}+|xapp-\d-[A-Za-z0-9-]{20,}+", "xox", "xapp-"),
    _rule(
        "slack-webhook",
        r"hooks\.slack\.com/(?P<secret>(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,}+)",
        "hooks.slack.com",
    ),
    _rule(
        "discord-webhook",
        rf"discord(?:app)?\.com/api/webhooks/(?P<secret>\d{{5,25}}/{_W}{{40,}}+)",
        "/api/webhooks/",
    ),
    _rule("discord-token", rf"[MNO]{_W}{{23,27}}\.{_W}{{6}}\.{_W}{{27,}}+", "."),
    _rule(
        "feishu-webhook",
        rf"(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/(?P<secret>{_W}{{20,}}+)",
        "/bot/v2/hook/",
    ),
    _rule("telegram-token", rf"\d{{8,10}}:AA{_W}{{32,}}+", ":aa"),
    _rule("twilio-key", rf"{_LEFT}SK[a-f0-9]{{32,}}+", "sk"),
    _rule("sendgrid-key", rf"SG\.{_W}{{16,64}}\.{_W}{{30,}}+", "sg."),
    _rule("mailgun-key", rf"{_LEFT}key-[a-f0-9]{{32,}}+", "key-"),
    _rule("mailchimp-key", r"(?P<secret>[a-f0-9]{32})-us\d{1,2}", "-us"),
    _rule("facebook-token", rf"(?<![A-Za-z0-9+/=])EAA{_A}{{80,}}+", "eaa"),
    _rule("linear-key", rf"lin_(?:api|oauth)_{_A}{{32,}}+", "lin_api_", "lin_oauth_"),
    _rule("notion-token", rf"ntn_{_A}{{40,}}+|secret_{_A}{{40,}}+", "ntn_", "secret_"),
    _rule("figma-token", rf"figd_{_W}{{36,}}+", "figd_"),
    _rule("airtable-token", rf"pat{_A}{{14}}\.[a-f0-9]{{60,}}+", "pat"),
    _rule("dropbox-token", rf"{_LEFT}sl\.(?:u\.)?{_W}{{100,}}+", "sl."),
)  # fmt: skip
"""What is always masked."""

CARDS = _rule("card", r"(?<!\d)(?<!\d[ -])\d(?:[ -]?\d){12,18}(?![ -]?\d)", check=_is_card)
"""Payment cards: 13 to 19 digits, maybe in groups, with a right Luhn sum."""
PHONES = _rule(
    "phone",
    r"(?<![\w+])\+\d{1,3}(?:[ ()./-]{0,2}\d){6,13}(?!\d)|(?<!\d)1[3-9]\d{9}(?!\d)|(?<!\d)\(\d{3}\) ?\d{3}-\d{4}(?!\d)",
)
"""Phone numbers: international ones, Chinese mobiles, and ``(555) 555-0100``."""
MAILS = _rule(
    "mail", r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,5}", "@"
)
"""Mail addresses."""
