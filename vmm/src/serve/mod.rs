// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq serve`: the bridge of a virtual machine of another program, by shared memory.
//!
//! ```text
//! socket ─▶ VMM's process and threads ─▶ offer of the host ─▶ host changes ─▶ device ─▶ bridge
//!    └────── VMM gets memory and doorbells, then runs its guest ◀──────────────────┘
//! ```
//! The VMM waits for its memory until all is in place: no request comes too early. It goes on when
//! the server ends or is killed, and the next server takes it over. A process of its own, without
//! rights, carries out the VM's requests.

mod bridge;
mod groups;
mod machine;
pub(crate) mod manager;
mod pending_vmms;
mod qmp;
mod refusals;
mod server;
mod signals;
mod socket;
mod takeover;
mod threads;
mod vm_process;
mod vmm;

use std::time::Duration;

use anyhow::{Context, bail};
use nix::unistd::User;
use vcpufreq_device::host::{ActuatorChoice, HostCpus, HostRoot};

use crate::{
    config::{VcpuConfig, likeness::Likeness, resolve},
    message::warn,
    options::{
        ActuatorWish,
        serve::{ServeArgs, ServedArgs},
    },
    sandbox::Sandbox,
    sys,
};
pub use machine::{Fate, ServedVm, give_memory};
pub use pending_vmms::PendingVmms;
pub use qmp::Qmp;
pub use refusals::Refusals;
use server::Server;
pub use signals::{EndSignals, Ready, wait};
pub use socket::{Allowed, Socket};
pub use takeover::forget;
pub use vmm::{Connection, Shared, Vmm};

/// The exit code when a VM is left without its bridge.
const ERROR: u8 = 2;

/// The message when no process answers the doorbells any more.
const WORKER_DIED: &str = "the process that carries out requests has died; start the server again";

/// How often a VM is looked at for what no file tells.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What is served, checked.
pub struct Served {
    options: ServedArgs,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuConfig>,
    /// What they were made like, in a line.
    pub likeness: String,
    /// How requests reach the host's scheduler.
    actuator: ActuatorChoice,
    host: HostRoot,
}

/// Serves one virtual machine after another until a signal ends it; returns the exit code.
///
/// # Errors
/// Whatever keeps it from starting, in one line.
pub fn serve(options: ServeArgs) -> anyhow::Result<u8> {
    // Before a file is opened.
    let mut handed = manager::handed_to(std::process::id());
    let served = Served::check(options.served, HostRoot::default())?;
    let user = options.listen.user.as_deref().map(user_of).transpose()?;
    let listen = options.listen;
    let allowed = Allowed {
        user,
        pid: listen.pid,
    };
    // Before any thread is made, so that all of them leave the signals alone.
    let signals = EndSignals::take().context("can't wait for signals")?;
    let path = listen.socket.as_deref();
    let socket = Socket::open(path, allowed, &mut handed.files)?;
    warn(&served.likeness);
    let taken_over = takeover::find(&socket, served.vcpus.len(), &handed.files)?;
    takeover::discard_ended(&handed.names)?;
    // A VM that was taken over has copies of its files.
    drop(handed);
    manager::ready()?;
    let server = Server {
        served,
        socket,
        signals,
    };
    server.run(taken_over, PendingVmms::by(listen.qmp))
}

fn user_of(name: &str) -> anyhow::Result<User> {
    let user = User::from_name(name).ok().flatten();
    user.with_context(|| format!("there is no user {name}; correct --user"))
}

impl Served {
    /// How many vCPUs it has.
    ///
    /// # Errors
    /// More than a device has.
    pub fn count(&self) -> anyhow::Result<u16> {
        u16::try_from(self.vcpus.len()).context("too many vCPUs")
    }

    /// Checks everything that can be checked without a VMM.
    ///
    /// # Errors
    /// The first rule that is broken, in one line.
    pub fn check(options: ServedArgs, host: HostRoot) -> anyhow::Result<Self> {
        if let Err(error) = sys::raise_open_files() {
            warn(&format!(
                "can't raise the limit of open files ({error}); VMs of many vCPUs may not be served"
            ));
        }
        if options.vcpus.no_bridge || !options.vcpus.rt.is_empty() {
            bail!("a VM of another program has neither --no-bridge nor --rt; leave them out");
        }
        if options.bridge.actuator == ActuatorWish::Scx {
            bail!("--actuator scx needs a guest of vcpufreq run; take another --actuator");
        }
        options.bridge.check_multi_tenant()?;
        let multi_tenant = options.bridge.multi_tenant;
        options.sandbox.check_multi_tenant(multi_tenant)?;
        // Each VM has its own; what the host lacks is reported once.
        Sandbox::by(options.sandbox, warn)?;
        let count = resolve::vcpu_count(&options.vcpus)?;
        let cpus = HostCpus::read(&host);
        let vcpus = resolve::vcpus(&options.vcpus, &cpus, count)?;
        Ok(Self {
            actuator: resolve::actuator_choice(&options.bridge)?,
            likeness: Likeness::of(&options.vcpus, &cpus, count).text(&vcpus),
            options,
            vcpus,
            host,
        })
    }
}
