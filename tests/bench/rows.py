"""The rows of the table of goals, in the order they are measured: memory first, while the processes are young."""

from tests.bench import rows_growth, rows_peers, rows_wire
from tests.bench.plan import Row

ROWS = (
    Row(7, "memory of an open run, engine + gateway, vs best peer", rows_peers.memory),
    Row(1, "engine CPU per token, one event each, memory store, vs raw grpc.aio", rows_wire.token_by_token),
    Row(2, "engine CPU per token in a burst, vs raw grpc.aio", rows_wire.burst),
    Row(3, "CPU of a 50-token tool run, engine + gateway, vs best peer", rows_peers.total),
    Row(4, "fixed CPU of a run, engine + gateway, vs best peer", rows_peers.fixed),
    Row(5, "CPU of a paced run, engine + gateway, vs best peer", rows_peers.paced),
    Row(6, "time to first text, engine + gateway, vs best peer", rows_peers.first_text),
    Row(8, "gateway CPU per event, vs raw ASGI + raw grpc.aio client", rows_wire.gateway),
    Row(9, "engine CPU per token, SQLite vs memory store", rows_wire.stores),
    Row(10, "growth: cost per event, run and turn", rows_growth.growth),
    Row(11, "replay of a stored run, vs raw grpc.aio messages", rows_wire.replay),
)
