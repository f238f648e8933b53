"""A filter on system calls: what no program needs to answer a question is refused by the kernel.

Beside the namespaces it closes what they leave open: new user namespaces (capabilities inside of them are much of the
kernel's attack surface) and kinds of sockets that belong to no network namespace (vsock reaches a VM's host).
Without namespaces it is what keeps a program from the network. It needs no rights.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct

from gradtrace.tasks.sandbox import linux

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD_WORD = 0x20
JUMP_EQUAL = 0x15
JUMP_GREATER_EQUAL = 0x35
JUMP_SET = 0x45
RETURN = 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the argument's lower half, on little-endian machines."""
X32 = 0x40000000
NAMESPACES = 0x7E020080
"""Every CLONE_NEW* flag."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, dict[str, int]] = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41},
    "aarch64": {"clone": 220, "clone3": 435, "socket": 198},
}
# fmt: off
REFUSED: dict[str, dict[str, int]] = {
    "x86_64": {
        "ptrace": 101, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
        "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
        "request_key": 249, "keyctl": 250, "io_uring_setup": 425, "process_vm_readv": 310,
        "process_vm_writev": 311, "open_by_handle_at": 304, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "mount_setattr": 442,
    },
    "aarch64": {
        "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
        "chroot": 51, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
        "request_key": 218, "keyctl": 219, "io_uring_setup": 425, "process_vm_readv": 270,
        "process_vm_writev": 271, "open_by_handle_at": 265, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "mount_setattr": 442,
    },
}
# fmt: on
LOCAL = (socket.AF_UNIX,)
OF_A_NETWORK_NAMESPACE = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (both relative), constant."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install(own_network: bool) -> None:
    """For this process and all it starts. On a machine other than x86_64 and aarch64 there is no filter.

    `own_network`: it has a network namespace, with nobody in it, and may open sockets there.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        return
    families = OF_A_NETWORK_NAMESPACE if own_network else LOCAL
    content = b"".join(struct.pack("HBBI", *instruction) for instruction in build(machine, families))
    program = _Program(len(content) // 8, content)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.set_filter(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def build(machine: str, families: tuple[int, ...]) -> list[Instruction]:
    calls = CALLS[machine]
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    allow = (RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (LOAD_WORD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, MACHINES[machine]),
        refuse,
        (LOAD_WORD, 0, 0, NUMBER),
        (JUMP_GREATER_EQUAL, 0, 1, X32),
        refuse,
    ]
    for number in REFUSED[machine].values():
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    # Its flags are behind a pointer, which a filter cannot follow; the C library then takes `clone`.
    program += [(JUMP_EQUAL, 0, 1, calls["clone3"]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    clone: list[Instruction] = [
        (LOAD_WORD, 0, 0, FIRST_ARGUMENT),
        (JUMP_SET, 0, 1, NAMESPACES),
        refuse,
        allow,
    ]
    program += [(JUMP_EQUAL, 0, len(clone), calls["clone"]), *clone]
    sockets: list[Instruction] = [(LOAD_WORD, 0, 0, FIRST_ARGUMENT)]
    for family in families:
        sockets += [(JUMP_EQUAL, 0, 1, int(family)), allow]
    sockets.append((RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT))
    program += [(JUMP_EQUAL, 0, len(sockets), calls["socket"]), *sockets, allow]
    return program
