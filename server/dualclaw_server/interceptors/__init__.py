"""Interceptors that ship: implementations of ``engine.interceptor.Interceptor``, each for one thing."""

from dualclaw_server.interceptors.audit import AuditInterceptor, JsonLinesSink, LogSink
from dualclaw_server.interceptors.budget import BudgetInterceptor, Price
from dualclaw_server.interceptors.compression import ContextCompressionInterceptor
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy
from dualclaw_server.interceptors.permission import PermissionInterceptor, Rule
from dualclaw_server.interceptors.sanitizer import ToolSanitizerInterceptor
from dualclaw_server.interceptors.stop_loop import StopLoopInterceptor
from dualclaw_server.interceptors.summary import Summarise, Trim
from dualclaw_server.interceptors.tool_retry import ToolRetryInterceptor, ToolRetryPolicy
from dualclaw_server.interceptors.tool_selection import ToolSelectionInterceptor
from dualclaw_server.interceptors.tracing import TracingInterceptor

__all__ = [
    "AuditInterceptor",
    "BudgetInterceptor",
    "ContextCompressionInterceptor",
    "HitlInterceptor",
    "JsonLinesSink",
    "LogSink",
    "PermissionInterceptor",
    "Policy",
    "Price",
    "Rule",
    "StopLoopInterceptor",
    "Summarise",
    "ToolRetryInterceptor",
    "ToolRetryPolicy",
    "ToolSanitizerInterceptor",
    "ToolSelectionInterceptor",
    "TracingInterceptor",
    "Trim",
]
