"""Settings of the A2A claw."""

from ipaddress import ip_address

from pydantic import Field

from dualclaw_clients.settings import ClientSettings, Listen, SettingsError


class A2aSettings(ClientSettings):
    """Settings of ``dualclaw-a2a``. Its own key (``DUALCLAW_API_KEY``) reads the public card and nothing else."""

    a2a_listen: Listen = "127.0.0.1:8100"
    """Where it listens for HTTP: JSON-RPC and the agent cards."""
    a2a_grpc_listen: Listen = "127.0.0.1:8101"
    """Where it listens for gRPC."""
    a2a_url: str = Field(default="", pattern=r"^(https?://[^\s/?#]+(/[^\s?#]*)?)?$")
    """Address of JSON-RPC as the card tells it, such as https://agents.example; empty: where it listens."""
    a2a_grpc_url: str = Field(default="", pattern=r"^([^\s/]+:\d{1,5})?$")
    """Address of gRPC as the card tells it, HOST:PORT; empty: where it listens."""
    a2a_agent: str = ""
    """Agent that answers where a caller names none; empty: the engine's default."""
    a2a_max_body: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Longest request in bytes."""
    a2a_max_streams: int = Field(default=1000, ge=1)
    """Most streams and waiting calls at a time; more are refused."""
    a2a_grace: float = Field(default=10.0, ge=0, le=3600)
    """Seconds calls may take to finish once it shuts down; streams end at once."""

    def check_service(self) -> None:
        """Check that the card will name addresses that somebody can call.

        Raises:
            SettingsError: a line for each that nobody can.
        """
        problems = [
            f"DUALCLAW_{name.upper()}: is needed, because {listen} is no address that others can call"
            for name, listen, url in (
                ("a2a_url", self.a2a_listen, self.a2a_url),
                ("a2a_grpc_url", self.a2a_grpc_listen, self.a2a_grpc_url),
            )
            if not url and is_wildcard(host_of(listen))
        ]
        if problems:
            raise SettingsError(problems)


def host_of(listen: str) -> str:
    """Return the host of an address to listen at, without brackets."""
    return listen.rpartition(":")[0].strip("[]")


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for every address of the machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host; False for a name, which only the system can resolve."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
