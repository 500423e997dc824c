// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest, a user or another program can put into vcpufreq, as functions of bytes. A target
//! panics where a promise doesn't hold; any other outcome is right.

mod console;
mod devicetree;
mod doorbells;
mod ivshmem;
mod kernel_image;
mod machine;
mod operations;
mod perf_ring;
mod qmp;
mod records;
mod registers;
mod shm;
mod state;
mod stats;
mod text;

pub use operations::operations;

/// A name, as on the command line, and the function.
pub type FuzzTarget = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[FuzzTarget] = &[
    ("registers", registers::registers),
    ("shm", shm::shm),
    ("doorbells", doorbells::doorbells),
    ("state", state::state),
    ("console", console::console),
    ("kernel-image", kernel_image::kernel_image),
    ("devicetree", devicetree::devicetree),
    ("options", text::options),
    ("profile", text::profile),
    ("cpu-list", text::cpu_list),
    ("trace", text::trace),
    ("perf-ring", perf_ring::perf_ring),
    ("bpf-event", text::bpf_event),
    ("ivshmem", ivshmem::ivshmem),
    ("qmp", qmp::qmp),
    ("metrics", text::metrics),
    ("records", records::records),
    ("stats", stats::stats),
];
