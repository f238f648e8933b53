"""What a program in the sandbox sees of the machine, and as whom it runs.

Namespaces: its own users, network (none), IPC, processes and files; those of IPC, processes and files are made anew
for every program, so that none finds what another left. Of the host's files there are, read-only, the
system's libraries, the Python installation with its packages, and the two runners of this folder. /tmp is private,
small and gone afterwards. No /proc: nothing to read there. Where Linux allows no namespaces, `enter_namespaces`
says so.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from pathlib import Path

from gradtrace.tasks.sandbox import linux

NOBODY = 65534
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/nix")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
"""Not /dev/zero: mapped and shared it is memory that no process is charged for."""
MOUNT_POINTS = ("/sys", "/mnt", "/srv")
"""A folder to build the new root on, in a mount namespace that nobody else sees. It must hide nothing we need."""
RUNNERS = "/runner"
PACKAGE = Path(__file__).resolve().parents[3]
"""The folder that holds `gradtrace`."""
INTERPRETER = os.path.realpath(sys.executable)
"""The program behind a virtual environment's link, which the jail does not have."""
TEMPORARY_SPACE = 64 << 20
MOST_PROCESSES = 64
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program gets the same reward, whatever order its sets have
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def enter_namespaces() -> None:
    """Move this process (one thread) into its own user, network and host-name namespaces, or raise OSError.

    Root without user namespaces but with CAP_SYS_ADMIN (a privileged container) does without the first.
    """
    apart = linux.CLONE_NEWNET | linux.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    keeper = os.getpid()
    helper = os.fork()
    if helper == 0:
        # Only a process outside of the new namespace may map more than one user into it.
        try:
            os.close(ready_write)
            if os.read(ready_read, 1):
                write_maps(keeper, user, group)
                os.write(done_write, b"1")
        finally:
            os._exit(0)
    os.close(ready_read)
    os.close(done_write)
    try:
        try:
            linux.unshare(linux.CLONE_NEWUSER | apart)
        except OSError as error:
            if user != 0:
                raise
            try:
                linux.unshare(apart)
            except OSError:
                raise error from None
            return
        os.write(ready_write, b"1")
        if not os.read(done_read, 1):
            raise OSError("the user and group maps of the new namespace could not be written")
    finally:
        os.close(ready_write)
        os.close(done_read)
        os.waitpid(helper, 0)


def write_maps(pid: int, user: int, group: int) -> None:
    """Map this user to itself inside the namespace; root brings `nobody` along, to become it."""
    folder = Path(f"/proc/{pid}")
    if user == 0:
        try:
            for name in ("uid_map", "gid_map"):
                (folder / name).write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
        except OSError:  # root of a container that has no other users
            pass
    (folder / "setgroups").write_text("deny")
    (folder / "gid_map").write_text(f"{group} {group} 1\n")
    (folder / "uid_map").write_text(f"{user} {user} 1\n")


def visible_folders() -> list[str]:
    """Folders of the host that the jail shows, outermost first, none inside of another."""
    python = [f"{prefix}/{name}" for prefix in (sys.base_prefix, sys.base_exec_prefix) for name in ("lib", "lib64")]
    wanted = [*LIBRARIES, *python, os.path.dirname(INTERPRETER), *package_folders()]
    found: list[str] = []
    for folder in sorted({os.path.normpath(folder) for folder in wanted}):
        inside = any(folder == shown or folder.startswith(f"{shown}/") for shown in found)
        if os.path.isdir(folder) and not inside:
            found.append(folder)
    return found


def package_folders() -> list[str]:
    """Folders of installed packages, numpy and the like: a model's code may import them."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def build_root() -> None:
    """Called in a new mount namespace: mount the jail's files and make them all there is."""
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    root = next(point for point in MOUNT_POINTS if os.path.isdir(point))
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    # Before the folders: one of them may be in /tmp, an environment made there for instance.
    os.mkdir(f"{root}/tmp")
    options = f"size={TEMPORARY_SPACE},nr_inodes=4096,mode=1777"
    linux.mount("tmpfs", f"{root}/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for folder in visible_folders():
        show(folder, root + folder)
    for name in ("sandbox", "verification"):
        inside = f"gradtrace/tasks/{name}"
        show(str(PACKAGE / inside), f"{root}{RUNNERS}/{inside}")
    os.mkdir(f"{root}/dev")
    for device in DEVICES:
        if os.path.exists(device):
            Path(root + device).touch()
            linux.mount(device, root + device, "none", linux.MS_BIND)
    os.symlink("/tmp", f"{root}/dev/shm")
    linux.enter_root(root)
    linux.mount("none", "/", "none", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)


def show(source: str, target: str) -> None:
    """Bind a folder read-only; a link stays a link."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    os.mkdir(target)
    linux.mount(source, target, "none", linux.MS_BIND | linux.MS_REC)
    for point in mounts_within(target):
        # Flags that the host's mount has cannot be taken away in a user namespace: keep them.
        kept = os.statvfs(point).f_flag & (linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_NOATIME | linux.MS_NODIRATIME)
        flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | kept
        linux.mount("none", point, "none", flags)


def mounts_within(folder: str) -> list[str]:
    """Mount points at and below a folder: read-only is a matter of each, and a remount reaches one alone."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4] for line in file]
    # A space in a name is written \\040.
    readable = [os.fsdecode(re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), point)) for point in points]
    return [point for point in dict.fromkeys(readable) if point == folder or point.startswith(f"{folder}/")]


def become_nobody() -> None:
    """Give up everything that root, or the owner of a user namespace, can do."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    if user == NOBODY:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
        except OSError:  # no other user is mapped here: it stays uid 0, without any capability
            user = 0
    linux.drop_capabilities()
    os.setresuid(user, user, user)


def limit_resources(seconds: float, memory: int, own_users: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: TEMPORARY_SPACE,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if own_users and counts_by_namespace():
        limits[resource.RLIMIT_NPROC] = MOST_PROCESSES
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def counts_by_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts within a user namespace, not all that the user runs on the machine."""
    major, minor, *_ = platform.release().split(".")
    return (int(major), int("".join(filter(str.isdigit, minor[:3])))) >= (5, 14)


ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Group:
    """A group made for this keeper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Opened before any namespace is entered: the kernel asks for the rights of who opened it.
        self._join = os.open(folder / "cgroup.procs", os.O_WRONLY)
        self._killed = self._kills()

    @staticmethod
    def create(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Group | None:
        """A new group beside this process's own, or None where that is not allowed."""
        lines = membership.read_text().splitlines() if membership.is_file() else []
        own = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), None)
        if own is None or not (root / "cgroup.controllers").is_file():
            return None
        for parent in {(root / own).parent if own else root, root / own}:
            folder = parent / f"gradtrace-{os.getpid()}"
            try:
                controllers = (parent / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= set(controllers):
                    folder.mkdir()
                    return Group(folder)
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        return None

    def limit(self, memory: int, processes: int) -> None:
        (self.folder / "memory.max").write_text(str(memory))
        (self.folder / "pids.max").write_text(str(processes))
        for name, value in {"memory.swap.max": "0", "memory.oom.group": "1"}.items():
            with contextlib.suppress(OSError):  # not in every kernel
                (self.folder / name).write_text(value)

    def join(self) -> None:
        """Called by a new process: it and all that it starts are in the group."""
        os.write(self._join, b"0")

    def was_killed(self) -> bool:
        """Did the kernel end something for its memory since the last time this was asked?"""
        before, self._killed = self._killed, self._kills()
        return self._killed > before

    def close(self) -> None:
        os.close(self._join)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _kills(self) -> int:
        events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0))
