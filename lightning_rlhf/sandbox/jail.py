"""What a process may do once `Jail.enter` has returned: compute, and nothing else. Needs no privileges; nothing undoes it.

    seccomp    no socket, process, signal or resource limit but its own, no change of any file; what is newer than the table
               does not exist, and system calls of other kinds kill it
    Landlock   opens the Python installation and system libraries for reading, /dev/null for writing; where the kernel has no
               Landlock (before 5.13, or switched off) seccomp refuses to open anything for writing, and files stay readable
    rlimits    memory, CPU time, size of files, open files; threads as far as the kernel counts them

A process can have threads but no children, so killing it ends everything that it began. Linux on x86-64 and ARM64.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct
from collections.abc import Iterator, Sequence

# name: numbers on x86-64 and on ARM64, None where there is no such call
_DENIED = {
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)},
    **{
        "sendmsg": (46, 211),
        "sendmmsg": (307, 269),
        "fork": (57, None),
        "vfork": (58, None),
        "execve": (59, 221),
        "execveat": (322, 281),
    },
    **{"setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97), "setns": (308, 268)},
    # other processes of the same user
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "tkill": (200, 130)},
    **{"pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    **{"sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "process_mrelease": (448, 448), "syslog": (103, 116)},
    # memory that no limit counts, that outlives the process, or that others of the user have
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193)},
    **{"semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188)},
    **{"msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # what all processes of a user or of the machine have together: watches, requests, disks to write, locks to wait for
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "io_setup": (206, 0)},
    **{"sync": (162, 81), "syncfs": (306, 267), "flock": (73, 32), "personality": (135, 92), "modify_ldt": (154, None)},
    # ways around the filter, or into the kernel
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265)},
    # files: Landlock knows nothing of owners, modes and times, and before 6.2 nothing of sizes
    **{"creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276)},
    **{"mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None)},
    **{"mknodat": (259, 33), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "openat2": (437, 437)},  # the last has its flags in memory
}
_CLONE, _CLONE3, _KILL, _TGKILL, _PRCTL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (157, 167), (302, 261)
_OPEN, _OPENAT, _SOCKETPAIR, _FCNTL, _IOCTL = (2, None), (257, 56), (53, 199), (72, 25), (16, 29)
_NEWER = 450
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _END = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE_THREAD = 0x10000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
_CAP_DAC_READ_SEARCH = 1 << 2
_F_SETOWN_EX, _F_SETLEASE, _FIOSETOWN, _SIOCSPGRP = 15, 1024, 0x8901, 0x8902
_NOBODY = 65534

RULES = 100
"""The descriptor of the Landlock ruleset."""

_libc = ctypes.CDLL(None, use_errno=True)


class Jail:
    """What the processes of a server have in common.

    Args:
        readable: files and folders that may be read; those that do not exist do not matter.
        landlock: use it if the kernel has it.
    """

    def __init__(self, readable: Sequence[str], landlock: bool = True) -> None:
        self.ruleset = _ruleset(readable) if landlock else None

    def drop_root(self) -> None:
        """Root becomes nobody, since limits do not bind root; it may still read what root could, as far as Landlock lets it."""
        if os.geteuid() != 0:
            return _set_capabilities(0)
        _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError:  # a container's root that may not
            pass
        return _set_capabilities(_CAP_DAC_READ_SEARCH)

    def enter(self, seconds: float, memory: int, file_size: int, threads: int = 1024) -> None:
        """Shut the calling process, which has one thread, in.

        Args:
            seconds: of CPU time.
            memory: bytes of address space.
            file_size: bytes that its output may have.
            threads: about how many it may have; counted are those of all processes of the user.

        Raises:
            OSError: the kernel refused; what was done before stays in force.
        """
        _libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
        with open("/proc/loadavg") as file:
            tasks = int(file.read().split()[3].partition("/")[2])
        limits = {"CPU": int(seconds) + 2, "AS": memory, "FSIZE": file_size, "NOFILE": 64, "CORE": 0, "MEMLOCK": 0}
        for name, value in (limits | {"NPROC": tasks + threads, "STACK": 64 << 20}).items():
            number = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if self.ruleset is not None:
            _check(_libc.syscall(446, self.ruleset, 0))
            os.close(self.ruleset)
        code = b"".join(struct.pack("=HBBI", *one) for one in _filter(os.getpid(), writes=self.ruleset is not None))
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
        _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)), 0, 0))


def _filter(pid: int, writes: bool) -> Iterator[tuple[int, int, int, int]]:
    """The seccomp program: (operation, jump if true, jump if false, operand)."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    column, architecture = _ARCHITECTURES[platform.machine()]
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)

    def when(call: tuple[int | None, int | None], argument: int, *test: int) -> Iterator[tuple[int, int, int, int]]:
        """Refuse ``call`` unless ``test`` (operation, true, false, operand) of an argument jumps over the refusal."""
        if (number := call[column]) is not None:
            yield (_EQUAL, 0, 4, number)
            yield (_LOAD, 0, 0, 16 + 8 * argument)
            yield test  # type: ignore[misc]
            yield refuse
            yield (_LOAD, 0, 0, 0)

    yield (_LOAD, 0, 0, 4)
    yield (_EQUAL, 1, 0, architecture)
    yield (_RETURN, 0, 0, _END)  # 32-bit calls have other numbers
    yield (_LOAD, 0, 0, 0)
    yield (_AT_LEAST, 0, 1, 0x40000000)
    yield (_RETURN, 0, 0, _END)  # so have those of x32
    yield (_AT_LEAST, 0, 1, _NEWER)
    yield (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            yield (_EQUAL, 0, 1, number)
            yield refuse
    yield (_EQUAL, 0, 1, _CLONE3[column])  # its flags are in memory, which a filter cannot read; libc then takes clone
    yield (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    yield from when(_CLONE, 0, _BITS, 1, 0, _CLONE_THREAD)
    for call in (_KILL, _TGKILL):
        yield from when(call, 0, _EQUAL, 1, 0, pid)
    yield from when(_PRLIMIT, 0, _EQUAL, 1, 0, 0)
    yield from when(_PRCTL, 0, _EQUAL, 0, 1, _PR_SET_PDEATHSIG)
    yield from when(_SOCKETPAIR, 1, _BITS, 0, 1, 0xE)  # others than streams can be sent elsewhere
    # the kernel then sends a signal of one's choice to any process, or lets others wait who open the file
    for command in (fcntl.F_SETOWN, _F_SETOWN_EX, _F_SETLEASE):
        yield from when(_FCNTL, 1, _EQUAL, 0, 1, command)
    for command in (_FIOSETOWN, _SIOCSPGRP):
        yield from when(_IOCTL, 1, _EQUAL, 0, 1, command)
    if not writes:
        yield from when(_OPEN, 1, _BITS, 0, 1, _WRITES)
        yield from when(_OPENAT, 2, _BITS, 0, 1, _WRITES)
    yield (_RETURN, 0, 0, _ALLOW)


def _ruleset(readable: Sequence[str]) -> int | None:
    """Descriptor of a Landlock ruleset; None where the kernel has none."""
    version = _libc.syscall(444, None, 0, 1)
    if version < 1:
        return None
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    handled = struct.pack(
        "=QQQ", everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0
    )  # TCP; signals, sockets
    ruleset = _check(_libc.syscall(444, handled, len(handled), 0))
    read_file, read_folder, write_file = 1 << 2, 1 << 3, 1 << 1
    for path in (*readable, "/dev/null"):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        access = read_file | (read_folder if os.path.isdir(path) else 0) | (write_file if path == "/dev/null" else 0)
        _check(_libc.syscall(445, ruleset, 1, struct.pack("=Qi", access, descriptor), 0))
        os.close(descriptor)
    os.dup2(ruleset, RULES, inheritable=False)
    os.close(ruleset)
    return RULES


def _set_capabilities(kept: int) -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
