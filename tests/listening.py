"""The addresses at which a process listens, from the tables of Linux."""

import ipaddress
import os
import struct
from pathlib import Path


def addresses(pid="self"):
    """Return the addresses of all listening TCP sockets of a process."""
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:  # LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])  # 32-bit words in the byte order of this machine
                numbers = struct.unpack(f"={len(words) // 4}I", words)
                found.add(ipaddress.ip_address(struct.pack(f">{len(numbers)}I", *numbers)))
    return found


def assert_loopback(pid="self"):
    found = addresses(pid)
    assert found and all(address.is_loopback or mapped_loopback(address) for address in found), found


def mapped_loopback(address):
    return address.version == 6 and address.ipv4_mapped is not None and address.ipv4_mapped.is_loopback
