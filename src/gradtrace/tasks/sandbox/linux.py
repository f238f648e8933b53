"""The few system calls of Linux that a jail needs and that Python has no function for, and the filter on those that a
program may make: what none needs to answer a question is refused by the kernel.

Beside the namespaces the filter closes what they leave open: new user namespaces (capabilities inside of them are much
of the kernel's attack surface) and kinds of sockets that belong to no network namespace (vsock reaches a VM's host).
Without namespaces it is what keeps a program from the network. It needs no rights.

Allowed is what Python, its threads, its child processes, files in /tmp and sockets need. Refused, among others:
everything that changes namespaces, mounts or keys, looks into other processes, or keeps memory that belongs to no
process (`shmget`, `msgget`, `semget`, `mq_open`, `memfd_create`, `setxattr`), and every call that is not yet invented.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import socket
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    _check(result, f"mount({source}, {target}, {kind})")


def enter_root(folder: str) -> None:
    """Make `folder`, a mount point, the root of this mount namespace, and let go of the old one."""
    os.chdir(folder)
    number = PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"no pivot_root known for {platform.machine()}")
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """SIGKILL when the parent ends, and at once if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """So that not even uid 0 gets any back by executing a program."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    prctl(PR_SET_NO_NEW_PRIVS, 1)


# ---------------------------------------------------------------- the filter

ALLOWED = """
    read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
    statx 332 291, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, lseek 8 62, mmap 9 222,
    mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227, mincore 27 232,
    membarrier 324 283, rseq 334 293, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133,
    sigaltstack 131 132, restart_syscall 219 128, ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65,
    writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, access 21 -,
    faccessat 269 48, faccessat2 439 439, pipe 22 -, pipe2 293 59, sendfile 40 71, splice 275 76, tee 276 77,
    copy_file_range 326 285, sched_yield 24 124, sched_getaffinity 204 123, sched_setaffinity 203 122,
    sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, sched_rr_get_interval 148 127, sched_getattr 315 275, getpriority 140 141,
    setpriority 141 140, dup 32 23, dup2 33 -, dup3 292 24, pause 34 -, nanosleep 35 101,
    clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -,
    times 100 153, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110,
    timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, timerfd_create 283 85,
    timerfd_settime 286 86, timerfd_gettime 287 87, getpid 39 172, gettid 186 178, getppid 110 173,
    getpgid 121 155, getpgrp 111 -, getsid 124 156, setpgid 109 154, setsid 112 157, socket 41 198,
    socketpair 53 199, connect 42 203, accept 43 202, accept4 288 242, bind 49 200, listen 50 201,
    getsockname 51 204, getpeername 52 205, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212,
    sendmmsg 307 269, recvmmsg 299 243, shutdown 48 210, setsockopt 54 208, getsockopt 55 209, clone 56 220,
    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260,
    waitid 247 95, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434 434, pidfd_send_signal 424 424,
    uname 63 160, sysinfo 99 179, getrlimit 97 163, setrlimit 160 164, prlimit64 302 261, getrusage 98 165,
    getcpu 309 168, getrandom 318 278, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45,
    ftruncate 77 46, fallocate 285 47, fadvise64 221 223, readahead 187 213, getdents 78 -, getdents64 217 61,
    getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -,
    mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35,
    symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, mknod 133 -, mknodat 259 33, chmod 90 -,
    fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, umask 95 166,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, statfs 137 43, fstatfs 138 44, openat 257 56,
    openat2 437 437, close_range 436 436, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
    llistxattr 195 12, flistxattr 196 13, getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177,
    getresuid 118 148, getresgid 120 150, getgroups 115 158, capget 125 90, setuid 105 146, setgid 106 144,
    setresuid 117 147, setresgid 119 149, prctl 157 167, arch_prctl 158 -, set_tid_address 218 96,
    set_robust_list 273 99, get_robust_list 274 100, futex 202 98, futex_waitv 449 449, epoll_create 213 -,
    epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
    eventfd 284 -, eventfd2 290 19, signalfd 282 -, signalfd4 289 74, inotify_init 253 -, inotify_init1 294 26,
    inotify_add_watch 254 27, inotify_rm_watch 255 28"""


def allowed_numbers(machine: str) -> dict[str, int]:
    """{name: number} of the allowed calls that this machine has."""
    column = ("x86_64", "aarch64").index(machine) + 1
    entries = [entry.split() for entry in ALLOWED.split(",")]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


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


def install_filter(own_network: bool) -> None:
    """Install the filter for this process and all that it starts, on x86_64 and aarch64; elsewhere there is none.

    `own_network`: it has a network namespace, with nobody in it, and may open sockets there.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        return
    families = OF_A_NETWORK_NAMESPACE if own_network else LOCAL
    content = b"".join(struct.pack("HBBI", *instruction) for instruction in build_filter(machine, families))
    program = _Program(len(content) // 8, content)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "prctl(PR_SET_SECCOMP)")


def build_filter(machine: str, families: tuple[int, ...]) -> list[Instruction]:
    allowed = allowed_numbers(machine)
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
