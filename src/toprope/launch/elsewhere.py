"""Servers that run elsewhere, asked whether they are there, so that a dead one is found before anything is dispatched.

Any HTTP answer will do, an error too: strangers need not know our health routes. Left to others: engines, which are
asked where they start (`servers.model.engines`).
"""

from __future__ import annotations

import asyncio

from toprope.errors.tree import ConfigError, PeerError, TransportError
from toprope.http.client import Client
from toprope.launch.config import Configuration
from toprope.launch.server_settings import ModelConfig, ServerConfig
from toprope.launch.strict import Where

ANSWER_S = 5.0
"""Seconds that a server elsewhere gets for its answer, attempts of connecting included."""


async def ask_elsewhere(configuration: Configuration, client: Client) -> None:
    """On return every server with a `url` has answered. Raises `ConfigError` naming the first that did not."""
    where = Where(configuration.file).at("servers")
    elsewhere = {name: config for name, config in configuration.servers.items() if config.url is not None}
    asked = (_ask(config, client, where.at(name).at("url")) for name, config in elsewhere.items())
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _ask(config: ServerConfig, client: Client, where: Where) -> None:
    assert config.url is not None
    peer = client.peer(config.url, None, api_key=config.api_key)
    path = "/v1/models" if isinstance(config, ModelConfig) else "/health"
    try:
        async with asyncio.timeout(ANSWER_S):
            await peer.request("GET", path)
    except PeerError:  # an answer, if an odd one
        return
    except (TransportError, TimeoutError) as error:
        reason = error.message if isinstance(error, TransportError) else f"nothing came within {ANSWER_S:g} s"
        raise ConfigError(
            f"{where}: {config.url} does not answer: {reason}; accepted: a server that is up, with any HTTP answer."
        ) from error
