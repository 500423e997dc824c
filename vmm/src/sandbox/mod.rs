// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM gives up before its guest runs. Set-up is the VMM's, with the rights that it was
//! started with; from the guest's first instruction on, the guardian alone has those.
//!
//! ```text
//! each thread, when it starts: user, capabilities ─▶ no_new_privs, landlock ─▶ seccomp of its class
//! main, last: limits ─▶ every thread is confined? ─▶ its own ─▶ the guest runs
//! ```
//! All of these are a thread's own in Linux. A thread that is started later has what its maker has,
//! and gives up more.

mod files;
mod filters;
mod identity;
mod limits;
mod thread_class;

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context as _, bail};
use caps::{CapSet, Capability, CapsHashSet};
use seccompiler::{BpfProgram, apply_filter};
use vcpufreq_bridge::BridgeThread;

use crate::lifecycle::guardian::GuardianSocket;
use crate::message::{chain, warn};
use crate::options::SandboxArgs;
use files::{Files, Support};
use identity::Identity;
pub use limits::Limits;
pub use thread_class::{CLASSES, ThreadClass};

thread_local! {
    /// Whether the thread has given up its rights.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// A process' sandbox.
#[derive(Debug)]
pub struct Sandbox {
    /// What a class may do.
    filters: Vec<(ThreadClass, BpfProgram)>,
    files: Files,
    identity: Identity,
    /// Threads start without rights from then on.
    main_is_confined: AtomicBool,
    /// Capabilities that each thread keeps.
    kept: CapsHashSet,
    /// Filters that each thread had before.
    outer_filters: u32,
    /// How long a thread that has just started may take to be confined.
    confined_within: Duration,
}

impl Sandbox {
    /// That of this process as the user wants it, before it has other threads; `None`: it was
    /// switched off. `report` gets a line for each part that the host lacks.
    ///
    /// # Errors
    /// When there can be none; or a part is missing, and all were required.
    pub fn by(wanted: SandboxArgs, report: impl Fn(&str)) -> anyhow::Result<Option<Self>> {
        if !wanted.is_on {
            if wanted.is_required {
                bail!("--require-sandbox can't be kept with --sandbox off; leave one of them out");
            }
            return Ok(None);
        }
        let mut lacks = Vec::new();
        let sandbox = Self::prepare(&mut lacks);
        let sandbox = sandbox.context("no sandbox can be made; see --sandbox off")?;
        if let Some(first) = lacks.first().filter(|_| wanted.is_required) {
            bail!("--require-sandbox: {first}");
        }
        for line in lacks {
            report(&format!("the sandbox lacks a part: {line}"));
        }
        Ok(Some(sandbox))
    }

    /// Prepares the sandbox of this process, before it has other threads. What the host doesn't
    /// have is one line each to `lacks`.
    ///
    /// # Errors
    /// When there can be no filters of system calls: the kernel has no seccomp.
    pub fn prepare(lacks: &mut Vec<String>) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let filters = CLASSES.map(|class| Ok((class, filters::build(class, pid)?)));
        // A thread of its own tries it.
        let filter = filters::refusing(ThreadClass::Events)?;
        let tried = std::thread::spawn(move || apply_filter(&filter));
        let tried = tried.join().ok().context("a thread has died")?;
        tried.context("the kernel filters no system calls (CONFIG_SECCOMP_FILTER)")?;
        let files = Files::of_kernel()?;
        match files.support {
            Support::Full => {}
            Support::Partial => lacks.push(
                "the kernel's landlock is an older one: it limits files, and not all of network and signals"
                    .to_owned(),
            ),
            Support::Missing => lacks.push(
                "the kernel has no landlock: boot with lsm=landlock,... for limits on what may be opened"
                    .to_owned(),
            ),
        }
        let identity = Identity::of_process(pid);
        let identity = identity.unwrap_or_else(|why| {
            lacks.push(chain(&why));
            Identity::UNCHANGED
        });
        if identity.is_shared() {
            lacks.push(
                "VMMs share one user in this user namespace, and can touch each other's threads"
                    .to_owned(),
            );
        }
        Ok(Self {
            filters: filters.into_iter().collect::<anyhow::Result<_>>()?,
            files,
            identity,
            main_is_confined: AtomicBool::new(false),
            kept: CapsHashSet::new(),
            outer_filters: limits::filters_of_this_thread(),
            confined_within: limits::CONFINED_WITHIN,
        })
    }

    /// A thread that has just started has so long to be confined.
    pub fn confine_within(&mut self, time: Duration) {
        self.confined_within = time;
    }

    /// Its threads keep `capability`, if this process has it: clamps of another user's threads take
    /// CAP_SYS_NICE.
    ///
    /// # Errors
    /// As capget(2).
    pub fn keep(&mut self, capability: Capability) -> anyhow::Result<()> {
        if caps::has_cap(None, CapSet::Permitted, capability)? {
            self.kept.insert(capability);
        }
        Ok(())
    }

    /// Confines the calling thread, for good.
    ///
    /// # Errors
    /// What the kernel refuses; part of it may be in force then.
    pub fn enter(&self, class: ThreadClass) -> anyhow::Result<()> {
        let filters = self.filters.iter();
        let mut filters = filters.filter(|(of, _)| *of == class);
        let (_, filter) = filters.next().context("a class has no filter")?;
        if !self.main_is_confined.load(SeqCst) {
            self.identity.enter(&self.kept)?;
            self.files.enter()?;
        }
        CONFINED.set(true);
        apply_filter(filter).context("can't filter system calls")
    }

    /// Confines the calling thread, or ends the process: a thread that isn't confined must not run
    /// beside a guest.
    pub fn enter_or_end(&self, class: ThreadClass) {
        if let Err(why) = self.enter(class) {
            warn(&format!(
                "thread {class:?} can't be confined ({}); see --sandbox",
                chain(&why)
            ));
            std::process::exit(2);
        }
    }

    /// The last step: confines the main thread, when all others are.
    ///
    /// # Errors
    /// As [`Self::enter`]; or a thread isn't confined.
    pub fn enter_last(&self, limits: Limits) -> anyhow::Result<()> {
        // What set-up had in memory.
        #[cfg(feature = "bpf")]
        vcpufreq_host_bpf::give_back_freed();
        limits.set()?;
        limits::check_others(self.confined_within, self.outer_filters, &self.kept)?;
        self.enter(ThreadClass::Main)?;
        self.main_is_confined.store(true, SeqCst);
        Ok(())
    }
}

/// The threads of a bridge in a sandbox, and the guardian, which has the rights that they lack.
#[derive(Debug)]
pub struct Confined {
    /// Where the threads go.
    pub sandbox: Arc<Sandbox>,
    /// Where that is asked; `None`: a thread that was confined gets nothing more.
    pub guardian: Option<Arc<GuardianSocket>>,
}

impl Confined {
    /// Confines the calling thread of the bridge, or ends the process.
    pub fn enter_or_end(&self, thread: BridgeThread) {
        self.sandbox.enter_or_end(match thread {
            BridgeThread::Requests => ThreadClass::Requests,
            BridgeThread::Maintenance => ThreadClass::Maintenance,
        });
    }

    /// Has the guardian open a frequency event for a confined thread. While the bridge starts, the
    /// main thread has its own rights: `None`.
    ///
    /// # Errors
    /// `PermissionDenied` without a guardian; what the guardian refuses.
    pub fn frequency_event(&self, pcpu: u32) -> io::Result<Option<OwnedFd>> {
        match &self.guardian {
            _ if !CONFINED.get() => Ok(None),
            Some(guardian) => guardian.frequency_event(pcpu).map(Some),
            None => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}
