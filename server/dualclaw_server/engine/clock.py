"""The time of what the engine writes."""

import time

from google.protobuf.timestamp_pb2 import Timestamp


def set_now(moment: Timestamp) -> None:
    """Set a time to now, to the microsecond; ``GetCurrentTime`` takes the long way over a datetime."""
    microseconds = time.time_ns() // 1_000
    moment.seconds, moment.nanos = microseconds // 1_000_000, microseconds % 1_000_000 * 1_000
