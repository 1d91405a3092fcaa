"""Fetches pictures from hosts that the operator allows.

A name is resolved once, its addresses are checked, and the connection goes to a checked address: a name that changes
its address meanwhile reaches nothing else. Redirects are checked in the same way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection

import httpx2

from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

MAX_REMOTE_BYTES = 20 << 20
_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(net)
    for net in ("192.0.0.0/24", "168.63.129.16/32", "fec0::/10", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96")
)
"""What Python does not know as private: services of protocols and of a cloud, site-local and old embeddings."""
_IPv4_BITS = (1 << 32) - 1


class RemotePictures:
    def __init__(self, allowed_hosts: Collection[str], timeout_s: float = _TIMEOUT_S) -> None:
        """An entry is HOST or HOST:PORT; *.HOST is every name below it, and * every host with a public address."""
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._timeout_s = timeout_s
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, path: str, url: str) -> tuple[bytes, str]:
        """Return the bytes and the media type. path is the body's name of the URL. Raises ApiError."""
        try:
            # No proxy of the environment: it would resolve the name again.
            if self._tls is None:  # 50 ms of CPU
                self._tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
            client = httpx2.AsyncClient(trust_env=False, verify=self._tls)
            async with asyncio.timeout(self._timeout_s), client:
                found: tuple[bytes, str] | str = url
                for _ in range(_MAX_REDIRECTS + 1):
                    found = await self._get(client, path, str(found))
                    if not isinstance(found, str):
                        return found
        except TimeoutError:
            invalid(path, f"the host takes longer than the limit of {self._timeout_s:g} s")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            invalid(path, f"cannot be fetched: {type(error).__name__}")
        return invalid(path, f"more than {_MAX_REDIRECTS} redirects, the limit")

    async def _get(self, client: httpx2.AsyncClient, path: str, text: str) -> tuple[bytes, str] | str:
        """Return the answer, or the address that it redirects to."""
        url = httpx2.URL(text)
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            invalid(path, "must be a data URI, or an http or https URL without a user name")
        address = await self._address(path, url)
        headers = {"Host": url.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"}
        async with client.stream(
            "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": url.host}
        ) as answer:
            if answer.has_redirect_location:
                return str(url.join(answer.headers["location"]))
            if answer.status_code != httpx2.codes.OK:
                invalid(path, f"the host answers with status {answer.status_code}")
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > MAX_REMOTE_BYTES:
                    invalid(path, f"larger than {MAX_REMOTE_BYTES} bytes, the limit for pictures from other hosts")
            return bytes(data), answer.headers.get("content-type", "")

    async def _address(self, path: str, url: httpx2.URL) -> str:
        """Return the address to connect to. Raises ApiError for a host that is not allowed or not public, OSError."""
        host, port = url.host.lower(), url.port or (443 if url.scheme == "https" else 80)
        names = {host} if url.port is None else {f"{host}:{port}"}
        suffixes = {"*." + host.split(".", n)[n] for n in range(1, host.count(".") + 1)} | {"*"}
        if not self._allowed & (names | suffixes if url.port is None else names):
            message = f"{shorten(url.netloc.decode())} is not among the hosts of --allow-remote-images"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, f"{path}: {message}", param=path)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        is_named = addresses == [host] and bool(self._allowed & names)  # the operator allows this very address
        if not addresses or not (is_named or all(map(is_public, addresses))):
            invalid(path, f"{shorten(host)} has an address of a private network, which is refused")
        return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is one of the Internet, and contains no other IPv4 address that is none."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64:
            embedded.append(ipaddress.IPv4Address(int(ip) & _IPv4_BITS))
        inner += [found for found in embedded if found is not None]
        if ip.ipv4_mapped is not None:
            inner.remove(ip)
    return all(
        each.is_global and not each.is_multicast and not any(each in net for net in _NOT_PUBLIC) for each in inner
    )
