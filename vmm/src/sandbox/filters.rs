// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls of each class of threads. Any other ends the process (`SECCOMP_RET_KILL_PROCESS`),
//! and the guardian cleans up; some are refused.
//!
//! ```text
//! each          memory without code, locks, clocks, files that are open
//! events        nothing else
//! disk          its file, in pieces
//! vCPU          KVM, the module, clamps
//! requests      eventfds, the module, BPF, clamps
//! stats         its socket, the module, BPF
//! tune          its sockets, the module, BPF, clamps
//! maintenance   as requests; read-only files, affinity, the guardian
//! main          all of these; the user, threads of this process
//! ```
//! Numbers of ioctl are checked, most by their type, and arguments of `bpf`, `clone`, `fcntl`, `mmap`,
//! `openat` and `tgkill`. A pointer's target can't be checked: paths are landlock's.

use std::collections::BTreeMap;

use anyhow::Context as _;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use vcpufreq_bridge::syscalls;

use super::ThreadClass;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// What each thread does: allocate, wait, use open files, end.
const COMMON: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
    libc::SYS_writev,
];
/// Clamps of vCPU threads, where no cgroup has them.
const CLAMPS: &[i64] = &[
    libc::SYS_sched_getattr,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setattr,
];
/// What waits for eventfds, timers and perf events.
const EPOLL: &[i64] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
];
/// What looks whether they are readable.
const WAIT: &[i64] = &[
    libc::SYS_epoll_pwait,
    libc::SYS_preadv2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];
/// What looks at files and folders, once they are open.
const FILES: &[i64] = &[
    libc::SYS_fstat,
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_statx,
];
/// Where vCPU threads run.
const AFFINITY: &[i64] = &[libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity];
/// The sockets for `vcpufreq stats` and `tune`, which are bound.
const SOCKET: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
];
/// What waits for several sockets.
const POLL: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
];
/// The socket to the guardian.
const GUARDIAN: &[i64] = &[libc::SYS_recvmsg, libc::SYS_sendmsg];
/// What only the main thread does: wait for the user, start and end threads, end the guardian, give a
/// disk's lock up.
const MAIN: &[i64] = &[
    libc::SYS_dup,
    libc::SYS_flock,
    libc::SYS_getrusage,
    libc::SYS_rt_sigaction,
    libc::SYS_set_tid_address,
    libc::SYS_shutdown,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// What carries a disk's requests out.
const DISK: &[i64] = &[libc::SYS_fdatasync, libc::SYS_preadv, libc::SYS_pwritev];

/// Types of ioctl (`_IOC_TYPE`): KVM, the module `vcpufreq_host`, perf events.
const KVM: u64 = 0xae;
const MODULE: u64 = 0xcf;
const PERF: u64 = 0x24;
/// Settings and size of the terminal: TCGETS, TCSETS, TCSETSW, TCSETSF, TIOCGWINSZ, and those with
/// `termios2`. A thread that crashes puts the settings back. Not TIOCSTI, which puts
/// characters into the input of the shell.
const TERMINAL: [u64; 9] = [
    0x5401,
    0x5402,
    0x5403,
    0x5404,
    0x5413,
    0x802c_542a,
    0x402c_542b,
    0x402c_542c,
    0x402c_542d,
];
/// Commands of `fcntl`. Not F_SETOWN, with which a file signals any process of the user.
const FCNTL: [u64; 6] = [
    flags(libc::F_GETFD),
    flags(libc::F_SETFD),
    flags(libc::F_GETFL),
    flags(libc::F_SETFL),
    flags(libc::F_DUPFD_CLOEXEC),
    flags(libc::F_GET_SEALS),
];
/// Calls that fail and don't end the process: libraries try them, and work without. malloc reads
/// `overcommit_memory`, a panic the names of its functions. `clone` takes the place of `clone3`,
/// since its flags can be checked. Without perf events, a path that takes over updates cur_perf
/// less often, and does not know the order of requests that come together.
const REFUSED: &[i64] = &[
    libc::SYS_clone3,
    libc::SYS_getcwd,
    libc::SYS_openat,
    libc::SYS_perf_event_open,
    libc::SYS_readlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
];

/// Commands of `bpf` that use what is open (`enum bpf_cmd`): a look into a map, a run of a program,
/// what an object is. No map is written: some are shared with other VMMs. Commands that open an
/// object by its number (11 to 14, 30, 31) need CAP_SYS_ADMIN. No thread has it any more: they
/// fail, as on hosts that never permit them.
const BPF: &[u64] = &[1, 10, 11, 12, 13, 14, 15, 30, 31];

/// Flags of a new thread of this process, as the C library gives them.
const THREAD: u64 = 0x3d_0f00;
/// Flags of `open` that write, or make a file.
const WRITING: u64 = flags(libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC);
/// `PROT_EXEC`.
const CODE: u64 = flags(libc::PROT_EXEC);
/// BPF's `BPF_RET | BPF_K`, and `BPF_JMP | BPF_JA`.
const RETURN: u16 = 0x06;
const JUMP: u16 = 0x05;
/// All bits of an argument of 32 bits.
const ALL: u64 = u32::MAX as u64;
/// What a new thread does to itself: its name, and a filter that takes more away.
const OF_NEW_THREAD: [(i64, u64); 3] = [
    (libc::SYS_prctl, flags(libc::PR_SET_NAME)),
    (libc::SYS_prctl, flags(libc::PR_SET_NO_NEW_PRIVS)),
    // SECCOMP_SET_MODE_FILTER
    (libc::SYS_seccomp, 1),
];

const fn flags(bits: libc::c_int) -> u64 {
    bits.unsigned_abs() as u64
}

/// Why no filter was made: a mistake in this file.
const WRONG: &str = "a filter of system calls is wrong";

/// The filter of a class, for process `pid`.
///
/// # Errors
/// When the crate refuses a rule: a mistake in this file.
pub fn build(class: ThreadClass, pid: u32) -> anyhow::Result<BpfProgram> {
    let mut rules = Rules::new();
    // Rules of a call are tried in this order: first what lets a vCPU enter its guest.
    for kind in types_of(class) {
        when(&mut rules, libc::SYS_ioctl, &[(1, 0xff00, kind << 8)])?;
    }
    allow(&mut rules, COMMON);
    allow(&mut rules, REFUSED);
    for command in FCNTL {
        when(&mut rules, libc::SYS_fcntl, &[(1, ALL, command)])?;
    }
    for number in TERMINAL {
        when(&mut rules, libc::SYS_ioctl, &[(1, ALL, number)])?;
    }
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        // No code is made.
        when(&mut rules, call, &[(2, CODE, 0)])?;
    }
    // A panic that aborts; a kick of a vCPU.
    when(&mut rules, libc::SYS_tgkill, &[(0, ALL, pid.into())])?;
    match class {
        // A write that isn't in the table waits for those that are.
        ThreadClass::Vcpu => allow(&mut rules, syscalls::VCPU),
        ThreadClass::Events => {}
        ThreadClass::Disk => allow(&mut rules, DISK),
        ThreadClass::Stats => {
            allow(&mut rules, SOCKET);
            bpf(&mut rules)?;
        }
        ThreadClass::Tune => {
            allow(&mut rules, &[CLAMPS, SOCKET, POLL].concat());
            bpf(&mut rules)?;
        }
        ThreadClass::Requests => {
            allow(&mut rules, &[CLAMPS, EPOLL, WAIT].concat());
            bpf(&mut rules)?;
        }
        ThreadClass::Maintenance => {
            allow(
                &mut rules,
                &[CLAMPS, EPOLL, WAIT, FILES, AFFINITY, GUARDIAN].concat(),
            );
            bpf(&mut rules)?;
            open_read_only(&mut rules)?;
        }
        ThreadClass::Main => {
            let calls = [
                CLAMPS, EPOLL, WAIT, FILES, AFFINITY, SOCKET, POLL, GUARDIAN, MAIN,
            ];
            allow(&mut rules, &calls.concat());
            bpf(&mut rules)?;
            open_read_only(&mut rules)?;
            when(&mut rules, libc::SYS_clone, &[(0, ALL, THREAD)])?;
            for (call, first) in OF_NEW_THREAD {
                when(&mut rules, call, &[(0, ALL, first)])?;
            }
        }
    }
    let rest = compile(rules, SeccompAction::KillProcess, SeccompAction::Allow)?;
    Ok(joined(refusing(class)?, rest))
}

/// One program of two: where the first one allows a call, the second one decides. Each filter of a
/// thread costs time in every exit of a vCPU.
fn joined(mut first: BpfProgram, second: BpfProgram) -> BpfProgram {
    let allow = u32::from(SeccompAction::Allow);
    for (left, instruction) in (0..).zip(first.iter_mut().rev()) {
        if (instruction.code, instruction.k) == (RETURN, allow) {
            (instruction.code, instruction.k) = (JUMP, left);
        }
    }
    first.extend(second);
    first
}

/// The types of ioctl of a class.
fn types_of(class: ThreadClass) -> &'static [u64] {
    match class {
        ThreadClass::Vcpu => &[KVM, MODULE],
        ThreadClass::Events | ThreadClass::Disk => &[],
        ThreadClass::Stats | ThreadClass::Tune => &[MODULE],
        ThreadClass::Requests | ThreadClass::Maintenance => &[MODULE, PERF],
        ThreadClass::Main => &[KVM, MODULE, PERF],
    }
}

/// Refuses a class what [`REFUSED`] lists, as a kernel without these calls does.
///
/// # Errors
/// As [`of`].
pub fn refusing(class: ThreadClass) -> anyhow::Result<BpfProgram> {
    let opens = matches!(class, ThreadClass::Main | ThreadClass::Maintenance);
    let mut rules = Rules::new();
    allow(&mut rules, REFUSED);
    if opens {
        rules.remove(&libc::SYS_openat);
    }
    let refused = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    compile(rules, SeccompAction::Allow, refused)
}

fn compile(
    rules: Rules,
    others: SeccompAction,
    listed: SeccompAction,
) -> anyhow::Result<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().context(WRONG)?;
    let filter = SeccompFilter::new(rules, others, listed, arch).context(WRONG)?;
    filter.try_into().context(WRONG)
}

fn allow(rules: &mut Rules, calls: &[i64]) {
    for call in calls {
        rules.insert(*call, Vec::new());
    }
}

fn bpf(rules: &mut Rules) -> anyhow::Result<()> {
    let mut commands = BPF.iter();
    commands.try_for_each(|command| when(rules, libc::SYS_bpf, &[(0, ALL, *command)]))
}

fn open_read_only(rules: &mut Rules) -> anyhow::Result<()> {
    rules.remove(&libc::SYS_openat);
    when(
        rules,
        libc::SYS_openat,
        &[(2, WRITING, flags(libc::O_RDONLY))],
    )
}

/// Allows a call when each argument, by its number, has a value below a mask.
fn when(rules: &mut Rules, call: i64, arguments: &[(u8, u64, u64)]) -> anyhow::Result<()> {
    let conditions = arguments.iter().map(|(number, mask, value)| {
        let compared = SeccompCmpOp::MaskedEq(*mask);
        SeccompCondition::new(*number, SeccompCmpArgLen::Dword, compared, *value)
    });
    let conditions = conditions.collect::<Result<_, _>>().context(WRONG)?;
    let rule = SeccompRule::new(conditions).context(WRONG)?;
    rules.entry(call).or_default().push(rule);
    Ok(())
}
