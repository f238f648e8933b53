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
from collections.abc import Iterable

from gradtrace.tasks.sandbox import linux, syscalls

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD_WORD = 0x20
JUMP_EQUAL = 0x15
JUMP_GREATER_EQUAL = 0x35
JUMP_GREATER = 0x25
JUMP_SET = 0x45
AND = 0x54
RETURN = 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, FOURTH_ARGUMENT = 0, 4, 16, 40
"""Offsets in struct seccomp_data; the arguments' lower halves, on little-endian machines."""
NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags together: each makes a new namespace."""

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE3 = 435
FIRST_NEW = 424
"""From this system call on, numbers are the same on all machines. A C library tries new calls first and, told that they
do not exist (ENOSYS), takes an old one; EPERM it would pass on to the program."""
SHARED_ANONYMOUS = 0x21
"""MAP_SHARED | MAP_ANONYMOUS: memory that outlives the mapping of the process that filled it, counted nowhere."""
LOCAL = (socket.AF_UNIX,)
OF_A_NETWORK_NAMESPACE = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (both relative), constant."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install(own_network: bool) -> None:
    """Install the filter for this process and all that it starts, on x86_64 and aarch64; elsewhere there is none.

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
    allowed = syscalls.numbers(machine)
    refuse, unknown, allow = answer(errno.EPERM), answer(errno.ENOSYS), (RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (LOAD_WORD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, MACHINES[machine]),
        refuse,
        (LOAD_WORD, 0, 0, NUMBER),
        # Its flags are behind a pointer, which a filter cannot follow; the C library then takes `clone`.
        (JUMP_EQUAL, 0, 1, CLONE3),
        unknown,
    ]
    clone = [(LOAD_WORD, 0, 0, FIRST_ARGUMENT), (JUMP_SET, 0, 1, NAMESPACES), refuse, allow]
    program += [(JUMP_EQUAL, 0, len(clone), allowed["clone"]), *clone]
    mmap = [
        (LOAD_WORD, 0, 0, FOURTH_ARGUMENT),
        (AND, 0, 0, SHARED_ANONYMOUS),
        (JUMP_EQUAL, 0, 1, SHARED_ANONYMOUS),
        refuse,
        allow,
    ]
    program += [(JUMP_EQUAL, 0, len(mmap), allowed["mmap"]), *mmap]
    sockets: list[Instruction] = [(LOAD_WORD, 0, 0, FIRST_ARGUMENT)]
    for family in families:
        sockets += [(JUMP_EQUAL, 0, 1, int(family)), allow]
    sockets.append(answer(errno.EAFNOSUPPORT))
    program += [(JUMP_EQUAL, 0, len(sockets), allowed["socket"]), *sockets]
    for first, last in ranges(allowed.values()):
        program += [(JUMP_GREATER_EQUAL, 0, 2, first), (JUMP_GREATER, 1, 0, last), allow]
    return [*program, (JUMP_GREATER_EQUAL, 0, 1, FIRST_NEW), unknown, refuse]


def answer(error: int) -> Instruction:
    """The call fails with this error."""
    return (RETURN, 0, 0, ERRNO | error)


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers: every system call passes through these comparisons."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
