// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest, a user or another program can put into vcpufreq, as functions of bytes. A target
//! panics where a promise doesn't hold; any other outcome is right.
#![forbid(unsafe_code)]

mod console;
mod devicetree;
mod kernel_image;
mod records;
mod registers;
mod text;

/// A name, as on the command line, and the function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("registers", registers::registers),
    ("console", console::console),
    ("kernel-image", kernel_image::kernel_image),
    ("devicetree", devicetree::devicetree),
    ("options", text::options),
    ("profile", text::profile),
    ("cpu-list", text::cpu_list),
    ("trace", text::trace),
    ("records", records::records),
];
