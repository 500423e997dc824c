// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq serve`: the bridge of a virtual machine of another program, by shared memory.
//!
//! ```text
//! socket ─▶ VMM's process and threads ─▶ offer of the host ─▶ host changes ─▶ device ─▶ bridge
//!    └────── VMM gets memory and doorbells, then runs its guest ◀──────────────────┘
//! ```
//! The VMM waits for its memory until all is in place: no request comes too early. A VMM of libvirt gets
//! the memory earlier; its guest waits until libvirt has placed the vCPUs. The VMM goes on when the server
//! ends or is killed, and the next server takes it over. A process of its own, without rights, carries
//! out the VM's requests.

mod awaited;
mod booted_tree;
mod bridge;
mod groups;
mod guest_ram;
mod hand_over;
mod locked;
mod machine;
mod other_threads;
mod pending_vmms;
mod qmp;
mod refusals;
mod served;
mod server;
mod socket;
mod starting;
mod takeover;
mod threads;
mod vm_process;
mod vmm;

use anyhow::Context;
use nix::unistd::User;
use vcpufreq_host::HostRoot;

use crate::{
    manager,
    message::{chain, warn},
    options::serve::ServeArgs,
    signals::EndSignals,
};
use awaited::{AwaitedProcess, AwaitedVmm};
pub use guest_ram::{WantedRam, check_coherent, ram_of, registers_in};
pub use machine::{LeftVmm, ServedVm, VmChange};
pub use pending_vmms::PendingVmms;
pub use qmp::Qmp;
pub use refusals::Refusals;
pub use served::Served;
use server::{REFUSED, Server};
pub use socket::{Allowed, Socket};
pub use starting::give_memory;
pub use takeover::{forget, forget_process};
pub use vmm::{Connection, ServedVmm, SharedWithVmm};

/// What `qemu` doesn't take.
const OR_QMP: &str = ", or give --qmp its control socket";

/// Serves one virtual machine after another until a signal ends it, or one that has registers in its
/// RAM; returns the exit code.
///
/// # Errors
/// Whatever keeps it from starting, in one line.
pub fn serve(options: ServeArgs) -> anyhow::Result<u8> {
    // Before a file is opened.
    let mut handed = manager::handed_to(std::process::id());
    options.listen.check()?;
    let mut served = Served::check(options.served, HostRoot::default())?;
    let user = options.listen.user.as_deref().map(user_of).transpose()?;
    let listen = options.listen;
    served.has_guardian = !listen.no_guardian;
    let allowed = Allowed {
        user,
        pid: listen.pid,
    };
    // Before any thread is made, so that all of them leave the signals alone.
    let signals = EndSignals::take().context("can't wait for signals")?;
    let process = listen.pid.map(AwaitedProcess::Number);
    let process = process.or(listen.pid_file.map(AwaitedProcess::File));
    let awaited = listen.dtb.zip(process);
    let awaited = awaited.map(|(tree, process)| AwaitedVmm { process, tree });
    let socket = match &awaited {
        Some(awaited) => {
            awaited.check(&served)?;
            None
        }
        None => {
            let path = listen.socket.as_deref();
            Some(Socket::open(path, allowed, &mut handed.files)?)
        }
    };
    warn(&served.topology_source);
    served.create_events()?;
    let mut known = match &socket {
        Some(socket) => takeover::find(socket, served.vcpus.len(), &handed.files)?,
        None => Vec::new(),
    };
    takeover::discard_ended(&handed.names)?;
    // A VM that was taken over has copies of its files.
    drop(handed);
    manager::ready()?;
    if let Some(awaited) = awaited {
        match awaited.found(&served, &signals) {
            Ok(Some(vmm)) => known.push(vmm),
            Ok(None) => return Ok(0),
            Err(error) => {
                warn(&chain(&error));
                return Ok(REFUSED);
            }
        }
    }
    let server = Server {
        served,
        socket,
        signals,
    };
    server.run(known, PendingVmms::by(listen.qmp, OR_QMP))
}

fn user_of(name: &str) -> anyhow::Result<User> {
    let user = User::from_name(name).ok().flatten();
    user.with_context(|| format!("there is no user {name}; correct --user"))
}
