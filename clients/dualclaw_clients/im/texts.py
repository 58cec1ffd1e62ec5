"""The relay's own words to people in a chat, in each language; everything else they read comes from the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dualclaw.errors import EngineError
from dualclaw_clients.adapters.questions import WORDINGS, Locale, Wording
from dualclaw_clients.im.decisions import Problem, Unclear

MAX_URL: Final = 2_000
"""Characters of an address that are shown; an image may be a whole ``data:`` URL."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Everything the relay says itself, in one language. ``{...}`` is filled in."""

    wording: Wording
    """The words of assembled answers."""
    new_conversation: str
    """Said by itself when the engine has lost the conversation."""
    empty_answer: str
    empty_message: str
    long_message: str
    too_many_waiting: str
    internal: str
    no_engine: str
    busy_engine: str
    seconds: str
    soon: str
    denied: str
    not_taken: str
    still_running: str
    parked: str
    legacy_failed: str
    media_failed: str
    media_names: Mapping[str, str]
    maybe_sent: str
    """Instead of a part of which nobody knows whether it arrived, where it is not sent again."""
    cancelled: str
    cancelling: str
    nothing_to_cancel: str
    begun_anew: str
    help: str
    may_not_approve: str
    no_approvals: str
    approvals: str
    more_approvals: str
    run: str
    run_waits_not: str
    run_unknown: str
    answered_already: str
    changed: str
    refused_answer: str
    still_open: str
    run_lost: str
    problems: Mapping[Problem, str]

    def refused(self, error: EngineError) -> str:
        """Return what to say when the engine did not start a run, or its answer could not be read to the end."""
        match error.reason:
            case "STORE_UNAVAILABLE":
                text = self.no_engine
            case "OVERLOADED" | "QUOTA_EXCEEDED":
                wait = self.seconds.format(count=f"{error.retry_after:.0f}") if error.retry_after else self.soon
                text = self.busy_engine.format(wait=wait)
            case "UNAUTHENTICATED" | "PERMISSION_DENIED":
                text = self.denied
            case _:
                text = self.not_taken
        return f"{text}\n{error.message}" if error.message else text

    def media_as_text(self, media_type: str, url: str) -> str:
        """Return what to say when the platform did not take an image or a video."""
        shown = url if len(url) <= MAX_URL else url[:MAX_URL] + "…"
        return self.media_failed.format(what=self.media_names.get(media_type, media_type), url=shown)

    def unclear(self, found: Unclear) -> str:
        """Return what to say when a reply cannot be carried out."""
        return self.problems[found.problem].format(numbers=self.listed(found.numbers))

    def listed(self, numbers: Sequence[int]) -> str:
        """Return numbers as people list them."""
        return self.wording.between.join(map(str, numbers)) or "?"


ZH: Final = Texts(
    wording=WORDINGS["zh"],
    new_conversation="ℹ️ 之前的对话已不存在，已开始新的对话。",
    empty_answer="（没有内容）",
    empty_message="⚠️ 这条消息没有文字，无法处理，请发送文字。",
    long_message="⚠️ 这条消息太长（超过 {limit} 个字符），没有处理，请分成几条或缩短后再发。",
    too_many_waiting="⚠️ 这个会话排队的消息太多，这条消息没有处理，请稍后再发。",
    internal="❌ 内部错误，这条消息没有处理完，请重新发送。",
    no_engine="❌ 暂时无法连接引擎，请稍后再试。",
    busy_engine="❌ 请求过多，请{wait}再试。",
    seconds="{count} 秒后",
    soon="稍后",
    denied="❌ 引擎拒绝了访问，请联系管理员。",
    not_taken="❌ 引擎没有处理这条消息。",
    still_running="⏳ 等待回答超时，任务 {run} 仍在后台进行，完成后会把结果发到这里；发送 /cancel 可取消。",
    parked="⚠️ 对话正在等待处理（任务 {run}），这条消息没有处理。请先处理以下事项，再继续对话；也可以发送 /cancel "
    "取消任务，或 /new 开始新对话。",
    legacy_failed="❌ 原有服务没有回答，请稍后再试。\n{problem}",
    media_failed="⚠️ {what}发送失败，地址：\n{url}",
    media_names=MappingProxyType({"image": "图片", "video": "视频"}),
    maybe_sent="⚠️ 上一段内容可能没有送达。",
    cancelled="⏹ 任务已取消。",
    cancelling="⏹ 正在取消任务 {run}…",
    nothing_to_cancel="ℹ️ 没有正在进行的任务。",
    begun_anew="ℹ️ 好的，下一条消息将开始新的对话。",
    help="直接发送文字即可提问。\n/cancel（或“取消”）：取消正在进行的任务\n/new（或“新对话”）：开始新的对话\n"
    "/approvals（或“待审批”）：列出等待审批的事项，后面可加任务编号\n/help（或“帮助”）：显示这段说明\n"
    "回答编号事项：“1 同意”“2 拒绝 原因”“1 同意，2 拒绝”“全部同意”；问题可用“1 您的答案”回答。",
    may_not_approve="⛔ 您没有审批权限，没有做任何决定，任务仍在等待。请联系审批人处理（任务 {run}）。",
    no_approvals="ℹ️ 没有等待处理的事项。",
    approvals="以下事项等待处理：",
    more_approvals="……还有更多，处理完以上事项后请再次发送 /approvals。",
    run="任务 {run}（{agent}，来自 {claw}）",
    run_waits_not="ℹ️ 任务 {run} 现在不等待任何答复（可能已处理、已过期或已结束），没有做任何决定。",
    run_unknown="⚠️ 找不到任务 {run}，没有做任何决定。",
    answered_already="ℹ️ 其中有事项已经被处理过，这次没有做任何决定。",
    changed="⚠️ 事项的内容已经变化，这次没有做任何决定，请看清后重新答复。",
    refused_answer="⚠️ 这个答复没有被接受，没有做任何决定：{problem}",
    still_open="仍在等待处理：",
    run_lost="ℹ️ 任务 {run} 已结束，但它的内容已无法取得，请在网页查看对话。",
    problems=MappingProxyType(
        {
            Problem.UNKNOWN: "⚠️ 没有编号 {numbers}，没有做任何决定。",
            Problem.CLOSED: "ℹ️ 编号 {numbers} 已经处理过，没有做任何决定。",
            Problem.NO_VERDICT: "⚠️ 请在编号 {numbers} 后写明“同意”或“拒绝”，没有做任何决定。",
            Problem.NO_TEXT: "⚠️ 请在编号 {numbers} 后写上您的答案，没有做任何决定。",
            Problem.CONDITION: "⚠️ 编号 {numbers} 的同意后面还有别的话，可能是条件，因此没有做任何决定。"
            "请只回复“同意”（需要备注时：“同意，备注：…”），或“拒绝”并说明原因。",
            Problem.EDIT: "⚠️ 聊天中不能修改参数，没有做任何决定。请在网页修改，或用命令行：dualclaw resume 任务编号 "
            "edit --args …",
            Problem.NOT_OFFERED: "⚠️ 编号 {numbers} 不支持这个答复，没有做任何决定。",
            Problem.NOT_WHOLE: "⚠️ 编号 {numbers} 的参数过长，未完整显示，不能在这里同意；请在网页或命令行处理。",
            Problem.TWICE: "⚠️ 编号 {numbers} 有两个答复，没有做任何决定。",
            Problem.UNREAD: "⚠️ 您发送这条消息时，编号 {numbers} 还没有显示，因此没有做任何决定。请看清后重新答复。",
            Problem.WHICH: "⚠️ 不清楚指的是哪一项，没有做任何决定。请带上编号（{numbers}）答复。",
        }
    ),
)
EN: Final = Texts(
    wording=WORDINGS["en"],
    new_conversation="ℹ️ The conversation is gone; a new one has begun.",
    empty_answer="(no content)",
    empty_message="⚠️ This message has no text and was not processed; please send text.",
    long_message="⚠️ This message is too long (more than {limit} characters) and was not processed; please shorten it.",
    too_many_waiting="⚠️ Too many messages wait in this chat; this one was not processed. Please send it again later.",
    internal="❌ Internal error: this message was not processed to the end. Please send it again.",
    no_engine="❌ The engine cannot be reached at the moment; please try again later.",
    busy_engine="❌ Too many requests; please try again {wait}.",
    seconds="in {count} seconds",
    soon="later",
    denied="❌ The engine refused access; please tell your administrator.",
    not_taken="❌ The engine did not process this message.",
    still_running="⏳ The answer takes long. Run {run} goes on, and its result will be sent here; /cancel ends it.",
    parked="⚠️ The conversation waits for people (run {run}), so this message was not processed. Decide the following "
    "first; /cancel ends the run, /new begins a new conversation.",
    legacy_failed="❌ The former service did not answer; please try again later.\n{problem}",
    media_failed="⚠️ The {what} could not be sent. Its address:\n{url}",
    media_names=MappingProxyType({"image": "image", "video": "video"}),
    maybe_sent="⚠️ The part before this may not have arrived.",
    cancelled="⏹ Cancelled.",
    cancelling="⏹ Cancelling run {run}…",
    nothing_to_cancel="ℹ️ Nothing is running.",
    begun_anew="ℹ️ The next message begins a new conversation.",
    help="Just write to ask.\n/cancel: end what is running\n/new: begin a new conversation\n"
    "/approvals: list what waits for approval; a run's id may follow\n/help: this text\n"
    'Answer numbered questions by "1 ok", "2 no REASON", "1 ok, 2 no", "all ok"; questions by "1 YOUR ANSWER".',
    may_not_approve="⛔ You may not approve. Nothing was decided, and the run still waits; please ask an approver "
    "(run {run}).",
    no_approvals="ℹ️ Nothing waits for a decision.",
    approvals="These wait for a decision:",
    more_approvals="… and more; send /approvals again after these.",
    run="Run {run} ({agent}, from {claw})",
    run_waits_not="ℹ️ Run {run} waits for no answer now (decided, expired or ended); nothing was decided.",
    run_unknown="⚠️ There is no run {run}; nothing was decided.",
    answered_already="ℹ️ One of these has its answer already; nothing was decided this time.",
    changed="⚠️ What was asked has changed; nothing was decided. Please read it again and reply.",
    refused_answer="⚠️ This answer was not accepted, and nothing was decided: {problem}",
    still_open="Still open:",
    run_lost="ℹ️ Run {run} has ended, but what it said cannot be read here any more; see the page.",
    problems=MappingProxyType(
        {
            Problem.UNKNOWN: "⚠️ There is no number {numbers}; nothing was decided.",
            Problem.CLOSED: "ℹ️ {numbers} has its answer already; nothing was decided.",
            Problem.NO_VERDICT: '⚠️ Say "ok" or "no" behind {numbers}; nothing was decided.',
            Problem.NO_TEXT: "⚠️ Write your answer behind {numbers}; nothing was decided.",
            Problem.CONDITION: "⚠️ The words behind the approval of {numbers} may be a condition; nothing was decided. "
            'Reply "ok" alone (with a note: "ok, note: …"), or "no" with the reason.',
            Problem.EDIT: "⚠️ Arguments cannot be edited in a chat; nothing was decided. Edit them on the page or by "
            "dualclaw resume RUN edit --args …",
            Problem.NOT_OFFERED: "⚠️ {numbers} does not take this answer; nothing was decided.",
            Problem.NOT_WHOLE: "⚠️ {numbers} was too long to be shown whole, so it cannot be approved here; "
            "use the page or the command line.",
            Problem.TWICE: "⚠️ {numbers} has two answers; nothing was decided.",
            Problem.UNREAD: "⚠️ {numbers} had not been shown when you wrote this; nothing was decided. Please read it "
            "and reply again.",
            Problem.WHICH: "⚠️ It is not clear which one you mean; nothing was decided. Reply with the number "
            "({numbers}).",
        }
    ),
)
TEXTS: Final[Mapping[Locale, Texts]] = MappingProxyType({"zh": ZH, "en": EN})
"""The one table of these texts; Chinese is the default."""
