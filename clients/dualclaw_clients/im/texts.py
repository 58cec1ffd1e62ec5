"""The relay's own words to people in a chat; everything else they read comes from the engine."""

from dualclaw import Run, RunState
from dualclaw.errors import EngineError
from dualclaw_clients.adapters.questions import questions_text

NEW_CONVERSATION = "ℹ️ 之前的对话已不存在，已开始新的对话。"
EMPTY_ANSWER = "（没有内容）"
TOO_MANY_WAITING = "⚠️ 这个会话排队的消息太多，这条消息没有处理，请稍后再发。"
INTERNAL = "❌ 内部错误，这条消息没有处理完，请重新发送。"
MEDIA_NAMES = {"image": "图片", "video": "视频"}


def refused(error: EngineError) -> str:
    """Return what to say when the engine did not start the run, or its answer could not be read to the end."""
    match error.reason:
        case "STORE_UNAVAILABLE":
            text = "❌ 暂时无法连接引擎，请稍后再试。"
        case "OVERLOADED" | "QUOTA_EXCEEDED":
            wait = f"{error.retry_after:.0f} 秒后" if error.retry_after else "稍后"
            text = f"❌ 请求过多，请{wait}再试。"
        case "UNAUTHENTICATED" | "PERMISSION_DENIED":
            text = "❌ 引擎拒绝了访问，请联系管理员。"
        case _ if error.metadata.get("grpc_code") == "DEADLINE_EXCEEDED":
            return "⚠️ 等待回答超时，任务仍在后台进行，稍后重发可取得结果。"
        case _:
            text = "❌ 引擎没有处理这条消息。"
    return f"{text}\n{error.message}" if error.message else text


def parked(run: Run) -> str:
    """Return what to say when a message cannot be taken because the conversation waits for people."""
    asked = questions_text(run.interrupts, numbered=False)
    return "\n\n".join(filter(None, ("⚠️ 对话正在等待处理，这条消息没有处理。请先处理以下事项，再继续对话。", asked)))


def is_parked(run: Run) -> bool:
    """Return whether a run waits for people."""
    return run.state == RunState.RUN_STATE_INTERRUPTED


def legacy_failed(problem: str) -> str:
    """Return what to say when the service before the engine did not answer."""
    return f"❌ 原有服务没有回答，请稍后再试。\n{problem}"


def media_as_text(media_type: str, url: str) -> str:
    """Return what to say when the platform did not take an image or a video."""
    return f"⚠️ {MEDIA_NAMES.get(media_type, media_type)}发送失败，地址：\n{url}"
