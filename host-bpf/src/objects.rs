// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The BPF programs, which the build has compiled and this crate carries.

#![forbid(unsafe_code)]

use libbpf_rs::{ObjectBuilder, OpenObject};

use crate::error::BpfError;

/// libelf reads an object in place, by words of up to 8 bytes.
#[repr(C, align(8))]
struct Aligned<T: ?Sized>(T);

/// The bytes of an object, by its name.
macro_rules! object {
    ($name:literal) => {{
        const FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(
            env!("OUT_DIR"),
            "/",
            $name,
            ".bpf.o"
        )));
        &FILE.0
    }};
}

/// The programs on the hooks, for all VMs of a host.
pub(crate) const DISPATCH: &[u8] = object!("dispatch");
/// The programs of a VM.
pub(crate) const VCPUFREQ: &[u8] = object!("vcpufreq");
/// Where an operator's policy is tried.
pub(crate) const JUDGE: &[u8] = object!("judge");
/// The scheduler of the service `vcpufreq scx`.
pub(crate) const SCX: &[u8] = object!("scx");

/// Opens an object; nothing of it is in the kernel yet.
pub(crate) fn open(object: &[u8]) -> Result<OpenObject, BpfError> {
    let opened = ObjectBuilder::default().open_memory(object);
    opened.map_err(|error| BpfError::Refused {
        what: "opening the BPF programs",
        why: format!("{error:#}"),
    })
}
