// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Changes of a host that end with the program that made them: on record before they are made, and
//! undone by that record in any process, after kill -9 too.
//!
//! A program has a [`Journal`], a folder of records that no other user could have written. A record has
//! its [`Owner`], or the boot that it is of. It lists the changes: a VMM's has [`JournalEntry`]s, others
//! have [`OldValue`]s.

#![forbid(unsafe_code)]

mod entry;
mod guests;
mod host;
mod journal;
mod kernel_host;
mod old_value;
mod own_dir;
mod owner;
mod retry;
mod scope;
mod strict;
mod target;
mod thread_stat;
mod value;

pub use entry::{JournalEntry, UndoHost};
pub use guests::{GuestCpus, InTheWay, VMM_DIR, Vcpus, check_free};
pub use host::{ReadHost, Reading, Unread, WriteHost};
pub use journal::{Journal, LockedFile, unfinished};
pub use kernel_host::KernelHost;
pub use old_value::{OldValue, ValueNow};
pub use own_dir::{Untrusted, check_socket, is_trusted};
pub use owner::{BOOT_ID, Owner, OwnerStatus};
pub use scope::JournalScope;
pub use strict::read_strictly;
pub use target::{ABSENT, THERE, Target};
pub use thread_stat::{ThreadStat, users};
pub use value::{Format, scheduling};
