"""The SuperLink's control interface: what the command `flwr` talks through, without the seconds that it imports."""

from pathlib import Path

import httpx
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext


def connect(address: str, certificate: Path) -> ControlHttpClient:
    """A client over TLS that trusts this authority only."""
    return ControlHttpClient.from_server_address(
        address,
        insecure=False,
        root_certificates=certificate.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), _LogsWithin(2)],
    )


class _LogsWithin:
    """The next part of a log is waited for no longer than this; Flower's client waits for ever."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        if context.rpc_method.endswith("/StreamLogs"):
            context.request.extensions["timeout"]["read"] = self.seconds
        return call_next(context)
