// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service manager, if it has started this program. It hands over files at the start and keeps
//! files for the next start. See sd_listen_fds(3) and sd_notify(3), which need no library.

use std::{
    collections::BTreeSet,
    env,
    os::{
        fd::{BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

use anyhow::Context;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::sys;

/// Files of a message: SCM_MAX_FD is 253.
const FILES: usize = 250;

/// What it has handed over.
#[derive(Default)]
pub struct ReceivedFiles {
    pub files: Vec<OwnedFd>,
    /// The names by which it keeps some of them, each once.
    pub names: BTreeSet<String>,
}

/// What it has handed to process `pid`: this one, or the one that has started it. To be called once,
/// before a file is opened.
pub fn handed_to(pid: u32) -> ReceivedFiles {
    let number = |name| env::var(name).ok()?.parse::<u32>().ok();
    let count = number("LISTEN_FDS").filter(|_| number("LISTEN_PID") == Some(pid));
    let count = count.and_then(|count| u16::try_from(count).ok());
    let handed = count.map(|count| ReceivedFiles {
        files: sys::take_handed(count),
        names: env::var("LISTEN_FDNAMES")
            .unwrap_or_default()
            .split(':')
            .map(str::to_owned)
            .collect(),
    });
    handed.unwrap_or_default()
}

/// Notifies it that the program waits for VMMs.
///
/// # Errors
/// As connect(2) and sendmsg(2): `ENOENT` or `ECONNREFUSED` when no manager listens at
/// `NOTIFY_SOCKET`. Without that variable nothing is sent, which is no error.
pub fn ready() -> anyhow::Result<()> {
    tell("READY=1", &[])
}

/// Has it store files by this name, for the next start.
///
/// # Errors
/// As [`ready`]. The files of messages before, of 250 each, stay stored.
pub fn store(name: &str, files: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
    let message = format!("FDSTORE=1\nFDNAME={name}");
    files
        .chunks(FILES)
        .try_for_each(|some| tell(&message, some))
}

/// Has it close the stored files of this name.
///
/// # Errors
/// As [`ready`]; the files stay stored.
pub fn discard(name: &str) -> anyhow::Result<()> {
    tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
}

fn tell(message: &str, files: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
    use std::os::fd::AsRawFd;
    let Some(address) = env::var_os("NOTIFY_SOCKET") else {
        return Ok(());
    };
    let sent = || {
        let address = match address.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&address)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        socket
            .send_with_fds(&[message.as_bytes()], &files)
            .map_err(|error| std::io::Error::from_raw_os_error(error.errno()))
    };
    sent().map(drop).context("can't notify the service manager")
}
